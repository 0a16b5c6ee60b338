#include "submission.h"

#include <utility>

#include "kernels.h"

namespace memsaver::sim {

CUresult find_stream(Call* call, CUstream handle, StreamPtr* stream) {
  *stream = state().streams.find(handle, call->context());
  return *stream == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult submit(Call* call, const StreamPtr& stream, Operation operation, Completion completion) {
  State& shared = state();
  operation.call = call->name();
  if (stream->capture != nullptr) return shared.captures.record(stream->capture.get(), operation);
  if (stream->legacy) {
    const CUresult admitted = shared.captures.admit_legacy_stream(stream->context, true);
    if (admitted != CUDA_SUCCESS) return admitted;
  }
  if (operation.kind == Operation::Kind::kLaunch) note_reads(&operation, stream->context->device);
  const TicketPtr ticket = shared.streams.submit(stream, std::move(operation));
  if (ticket == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  if (completion == Completion::kLater) return CUDA_SUCCESS;
  shared.streams.wait(call->lock(), {ticket});
  return stream->context->broken;
}

}  // namespace memsaver::sim
