#include "capture.h"

#include <algorithm>

#include "contexts.h"
#include "state.h"

namespace memsaver::sim {
namespace {

thread_local CUstreamCaptureMode t_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool is_mine(const Capture& capture) { return pthread_equal(capture.thread, pthread_self()) != 0; }

bool forbids_unsafe_calls_here(const Capture& capture) {
  if (t_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (is_mine(capture)) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return t_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

}  // namespace

CUstreamCaptureMode Captures::exchange_thread_mode(CUstreamCaptureMode mode) {
  const CUstreamCaptureMode before = t_mode;
  t_mode = mode;
  return before;
}

CUresult Captures::begin(const StreamPtr& stream, CUstreamCaptureMode mode) {
  if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->origin = stream;
  stream->capture = capture;
  active_.push_back(capture);
  return CUDA_SUCCESS;
}

CUresult Captures::end(const StreamPtr& stream, Graph* graph) {
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !is_mine(*capture)) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  detach(capture);
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  *graph = std::move(capture->graph);
  return CUDA_SUCCESS;
}

void Captures::detach(const std::shared_ptr<Capture>& capture) {
  for (const StreamPtr& stream : state().streams.all()) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
  capture->origin = nullptr;
  active_.erase(std::find(active_.begin(), active_.end(), capture));
}

CUresult Captures::admit_unsafe_call() {
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : active_) {
    if (!forbids_unsafe_calls_here(*capture)) continue;
    capture->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult Captures::admit_context_wait(const Context* context) {
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : active_) {
    if (capture->origin->context != context) continue;
    capture->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult Captures::admit_legacy_stream(const Context* context, bool invalidate) {
  CUresult result = CUDA_SUCCESS;
  for (const StreamPtr& stream : state().streams.all()) {
    if (stream->context != context || !stream->blocking || stream->capture == nullptr) continue;
    if (invalidate) stream->capture->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return result;
}

CUresult Captures::admit_stream_wait(const StreamPtr& stream) {
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (stream->legacy) {
    const CUresult result = admit_legacy_stream(stream->context, true);
    if (result != CUDA_SUCCESS) return result;
  }
  return admit_unsafe_call();
}

CUresult Captures::record(Capture* capture, const Operation& operation) {
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  capture->graph.nodes.push_back(operation);
  return CUDA_SUCCESS;
}

CUresult Captures::follow(const StreamPtr& stream, const Event& event, bool* runs_now) {
  *runs_now = false;
  if (!event.captured) {
    if (stream->capture == nullptr) {
      *runs_now = true;
      return CUDA_SUCCESS;
    }
    if (event.ticket == nullptr) return CUDA_SUCCESS;  // never recorded: nothing to wait for
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  const std::shared_ptr<Capture> capture = event.capture.lock();
  if (capture == nullptr || capture->origin == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->legacy) {
    capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (stream->capture == nullptr) stream->capture = capture;
  if (stream->capture == capture) return CUDA_SUCCESS;
  stream->capture->invalid = true;
  capture->invalid = true;
  return CUDA_ERROR_STREAM_CAPTURE_MERGE;
}

void Captures::leave(const StreamPtr& stream) {
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return;
  capture->invalid = true;
  stream->capture = nullptr;
  if (capture->origin == stream) detach(capture);
}

void Captures::drop_all_of(const Context* context) {
  const std::vector<std::shared_ptr<Capture>> all = active_;
  for (const auto& capture : all) {
    if (capture->origin->context == context) detach(capture);
  }
}

}  // namespace memsaver::sim
