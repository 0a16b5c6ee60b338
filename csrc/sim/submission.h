// Submission of work to a stream: checks, capture, queue, and the waits that each call guarantees.
#pragma once

#include <cuda.h>

#include "calls.h"

namespace memsaver::sim {

enum class Completion {
  kLater,         // returns once the work is queued
  kBeforeReturn,  // the call waits for the work, with the lock released
};

// Submits the operation to the stream, or records it in the stream's capture.
CUresult submit(Call* call, const StreamPtr& stream, Operation operation, Completion completion);

// Finds the stream of a handle in the call's context. Returns CUDA_ERROR_INVALID_HANDLE if there is
// no such stream.
CUresult find_stream(Call* call, CUstream handle, StreamPtr* stream);

}  // namespace memsaver::sim
