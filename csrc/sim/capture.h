// Stream captures: what they record, and which calls they forbid.
//
// A capture records copies, sets and host functions in the order of the calls; replaying runs them
// one after the other on one stream. Needs the lock of state.h.
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
  pthread_t thread{};  // that began it
  StreamPtr origin;
  bool invalid = false;
  Graph graph;
};

class Captures {
 public:
  CUresult begin(const StreamPtr& stream, CUstreamCaptureMode mode);
  // Ends in every case but those of a stream or thread that did not begin one.
  CUresult end(const StreamPtr& stream, Graph* graph);

  // For a call that may wait for the device or that the driver counts as potentially unsafe:
  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, with the captures in the way invalidated, unless the
  // calling thread's mode and the captures' modes let it pass.
  CUresult admit_unsafe_call();
  // cuCtxSynchronize: refused, and every capture of the context invalidated, in whatever mode.
  CUresult admit_context_wait(const Context* context);
  // Work on the legacy stream: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT when a blocking stream of the
  // context captures, which `invalidate` then makes invalid.
  CUresult admit_legacy_stream(const Context* context, bool invalidate);
  // A wait for the stream: refused when it captures itself, else as admit_unsafe_call.
  CUresult admit_stream_wait(const StreamPtr& stream);

  // Records instead of running. CUDA_ERROR_STREAM_CAPTURE_INVALIDATED when it no longer can.
  CUresult record(Capture* capture, const Operation& operation);
  // The waiting stream follows the event: into its capture when that is being captured. Sets
  // *runs_now when neither side captures.
  CUresult follow(const StreamPtr& stream, const Event& event, bool* runs_now);

  void drop_all_of(const Context* context);
  // The stream is being destroyed: a capture that it began is over, one that it joined invalid.
  void leave(const StreamPtr& stream);
  uint64_t active() const { return active_.size(); }

  // The calling thread's mode; needs no lock.
  static CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode);

 private:
  void detach(const std::shared_ptr<Capture>& capture);

  std::vector<std::shared_ptr<Capture>> active_;
};

}  // namespace memsaver::sim
