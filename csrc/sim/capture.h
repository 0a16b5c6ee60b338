// Stream captures: the recorded operations, and the calls that captures forbid.
//
// A capture records copies, memsets and host functions in the order of the calls. A replay runs
// these operations one after the other on one stream. The caller of a function must own
// State::mutex (state.h), unless the function is documented to need no lock.
#pragma once

#include <cuda.h>
#include <pthread.h>

#include <memory>
#include <vector>

#include "streams.h"

namespace memsaver::sim {

struct Graph {
  std::vector<Operation> nodes;
};

struct Capture {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  pthread_t thread{};  // the thread that began the capture
  StreamPtr origin;
  bool invalid = false;
  Graph graph;
};

class Captures {
 public:
  CUresult begin(const StreamPtr& stream, CUstreamCaptureMode mode);
  // Ends the capture, even on error, unless the stream or the thread did not begin the capture.
  CUresult end(const StreamPtr& stream, Graph* graph);

  // Checks a call that can wait for the device or that the driver considers potentially unsafe.
  // Returns CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and invalidates the conflicting captures, unless
  // the modes of the calling thread and of the captures allow the call.
  CUresult admit_unsafe_call();
  // Checks cuCtxSynchronize, which fails and invalidates every capture of the context, in any mode.
  CUresult admit_context_wait(const Context* context);
  // Checks work on the legacy stream. Returns CUDA_ERROR_STREAM_CAPTURE_IMPLICIT if a blocking
  // stream of the context is capturing, and invalidates the capture if `invalidate` is true.
  CUresult admit_legacy_stream(const Context* context, bool invalidate);
  // Checks a wait for the stream. Fails if the stream is capturing, otherwise behaves like
  // admit_unsafe_call().
  CUresult admit_stream_wait(const StreamPtr& stream);

  // Records the operation instead of running it. Returns CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if
  // the capture is invalid.
  CUresult record(Capture* capture, const Operation& operation);
  // Makes the stream wait for the event and join the event's capture, if any. Sets *runs_now if
  // neither the stream nor the event is capturing.
  CUresult follow(const StreamPtr& stream, const Event& event, bool* runs_now);

  void drop_all_of(const Context* context);
  // Called when the stream is destroyed. Ends a capture that the stream began, and invalidates a
  // capture that the stream joined.
  void leave(const StreamPtr& stream);
  uint64_t active() const { return active_.size(); }

  // Exchanges the calling thread's capture mode. Needs no lock.
  static CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode);

 private:
  void detach(const std::shared_ptr<Capture>& capture);

  std::vector<std::shared_ptr<Capture>> active_;
};

}  // namespace memsaver::sim
