// transition_completion: the phase of a transition, for threads that order a stream after it.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "core/driver/handles.h"
#include "core/memory/registry.h"

namespace memsaver {

// Any thread may call any function.
class TransitionCompletion {
 public:
  // Records that all memory is mapped and all copies are queued: work after the events sees the
  // contents.
  void set_queued(std::vector<Event> events);
  // Records a failure after set_queued. Returns whether set_queued was called.
  bool withdraw() noexcept;
  void end(bool succeeded) noexcept;

  // Waits until the copies are queued, or the transition has ended; then makes work that is
  // submitted to the stream after this call wait for the copies. `tags` are the transition's.
  // Throws kInvalidState if the transition failed, or if the wait would deadlock.
  void wait_stream(const std::vector<Tag*>& tags, CUstream stream);

 private:
  enum class Phase { kRunning, kQueued, kDone, kFailed };

  std::mutex mutex_;  // guards all fields below
  std::condition_variable changed_;
  Phase phase_ = Phase::kRunning;
  std::vector<Event> events_;
};

}  // namespace memsaver
