// Entry points: events.
#include <cuda.h>

#include "submission.h"

using namespace memsaver::sim;

namespace {

std::shared_ptr<Event> find_event(CUevent handle) {
  auto found = state().events.find(handle);
  return found == state().events.end() ? nullptr : found->second;
}

// Checks a query or a wait, which fails for an event inside a capture and while a capture forbids
// it.
CUresult admit(const Event* event) {
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (event->captured) {
    if (const std::shared_ptr<Capture> capture = event->capture.lock()) capture->invalid = true;
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  return state().captures.admit_unsafe_call();
}

CUresult elapsed(float* milliseconds, CUevent start, CUevent end) {
  Call call("cuEventElapsedTime", Needs::kContext);
  if (call.refused()) return call.status();
  const std::shared_ptr<Event> first = find_event(start);
  const std::shared_ptr<Event> second = find_event(end);
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (first == nullptr || second == nullptr || !first->timing || !second->timing ||
      first->ticket == nullptr || second->ticket == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!first->ticket->done || !second->ticket->done) return CUDA_ERROR_NOT_READY;
  *milliseconds = static_cast<float>(second->ticket->milliseconds - first->ticket->milliseconds);
  return CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuEventCreate(CUevent* handle, unsigned int flags) {
  Call call("cuEventCreate", Needs::kContext);
  if (call.refused()) return call.status();
  constexpr unsigned kKnownFlags =
      CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (handle == nullptr || (flags & ~kKnownFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->context = call.context();
  event->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *handle = reinterpret_cast<CUevent>(state().next_handle());
  state().events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
  Call call("cuEventDestroy", Needs::kContext);
  if (call.refused()) return call.status();
  return state().events.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  Call call("cuEventRecord", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, stream_handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  const std::shared_ptr<Event> event = find_event(handle);
  if (event == nullptr || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  Operation marker;
  const CUresult submitted = submit(&call, stream, marker, Completion::kLater);
  if (submitted != CUDA_SUCCESS) return submitted;
  event->captured = stream->capture != nullptr;
  event->capture = stream->capture;
  event->ticket = event->captured ? nullptr : stream->last;
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  Call call("cuEventQuery", Needs::kContext);
  if (call.refused()) return call.status();
  const std::shared_ptr<Event> event = find_event(handle);
  const CUresult admitted = admit(event.get());
  if (admitted != CUDA_SUCCESS) return admitted;
  return event->ticket == nullptr || event->ticket->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  Call call("cuEventSynchronize", Needs::kContext);
  if (call.refused()) return call.status();
  const std::shared_ptr<Event> event = find_event(handle);
  const CUresult admitted = admit(event.get());
  if (admitted != CUDA_SUCCESS) return admitted;
  if (event->ticket != nullptr) state().streams.wait(call.lock(), {event->ticket});
  return call.context()->broken;
}

// The driver exports two names with the same behavior; cuda.h declares one of them, depending on
// its version.
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return elapsed(milliseconds, start, end);
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return elapsed(milliseconds, start, end);
}

}  // extern "C"
#pragma GCC visibility pop
