// transition_completion: the phase of a transition, for threads that make a stream wait for the
// transition.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "core/backup/copy_events.h"
#include "core/memory/registry.h"
#include "core/platform/range.h"

namespace memsaver {

// Any thread may call any function.
class TransitionCompletion {
 public:
  // Records that all memory is mapped and all copies are queued, and stores each device's events.
  // Work that is queued after an event sees the contents whose copies were queued before the event.
  void set_queued(std::vector<CopyEvents> events);
  // Records a failure after set_queued(). Returns whether set_queued() was called.
  bool withdraw() noexcept;
  void end(bool succeeded) noexcept;

  // Waits until the copies are queued or the transition has ended. Then makes work that is
  // submitted to the stream after this call wait for the copies. `tags` are the transition's tags.
  // Throws kInvalidState if the transition failed, or if the wait would deadlock.
  void wait_stream(const std::vector<Tag*>& tags, CUstream stream);
  // See Transition::wait_ranges.
  void wait_ranges(const std::vector<Tag*>& tags, const std::vector<Range>& ranges,
                   const CUstream* stream);

 private:
  // Waits until the copies are queued or the transition has ended. Returns the lock on `mutex_`.
  // Throws the same errors as wait_stream().
  std::unique_lock<std::mutex> await_copies(const std::vector<Tag*>& tags);
  // The next three functions require the lock.
  void require_not_failed() const;
  std::vector<const Event*> last_events() const;
  void wait_for(const std::vector<const Event*>& events, const CUstream* stream,
                std::unique_lock<std::mutex>& lock);

  enum class Phase { kRunning, kQueued, kDone, kFailed };

  std::mutex mutex_;  // guards all fields below; after set_queued, `events_` is constant
  std::condition_variable changed_;
  Phase phase_ = Phase::kRunning;
  std::vector<CopyEvents> events_;  // of each device
};

}  // namespace memsaver
