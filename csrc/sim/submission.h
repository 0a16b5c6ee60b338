// From an entry point to a stream: checks, capture, queue, and the waits that the call promises.
#pragma once

#include <cuda.h>

#include "calls.h"

namespace memsaver::sim {

enum class Completion {
  kLater,         // returns once the work is queued
  kBeforeReturn,  // the call waits for it, giving up the lock
};

// Submits to the stream, or records into its capture.
CUresult submit(Call* call, const StreamPtr& stream, Operation operation, Completion completion);

// The stream behind a handle in the call's context; CUDA_ERROR_INVALID_HANDLE.
CUresult find_stream(Call* call, CUstream handle, StreamPtr* stream);

}  // namespace memsaver::sim
