#include "core/transition/transition_completion.h"

#include <optional>
#include <utility>

#include "core/driver/driver.h"
#include "core/memory/reservation.h"

namespace memsaver {

void TransitionCompletion::set_queued(std::vector<CopyEvents> events) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_ = std::move(events);
  phase_ = Phase::kQueued;
  changed_.notify_all();
}

bool TransitionCompletion::withdraw() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ != Phase::kQueued) return false;
  phase_ = Phase::kFailed;
  changed_.notify_all();
  return true;
}

void TransitionCompletion::end(bool succeeded) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  phase_ = succeeded ? Phase::kDone : Phase::kFailed;
  changed_.notify_all();
}

std::unique_lock<std::mutex> TransitionCompletion::await_copies(const std::vector<Tag*>& tags) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (phase_ == Phase::kRunning) {
    lock.unlock();
    const WaitsForTransition declared(tags);
    lock.lock();
    changed_.wait(lock, [this] { return phase_ != Phase::kRunning; });
    lock.unlock();  // before `declared` takes the registry's
  }
  if (!lock.owns_lock()) lock.lock();
  require_not_failed();
  return lock;
}

void TransitionCompletion::require_not_failed() const {
  if (phase_ != Phase::kFailed) return;
  throw Error(
      Status::kInvalidState,
      "the transition failed, so its copies cannot be waited for: ms_transition_run returned "
      "the error");
}

void TransitionCompletion::wait_stream(const std::vector<Tag*>& tags, CUstream stream) {
  std::unique_lock<std::mutex> lock = await_copies(tags);
  wait_for(last_events(), &stream, lock);
}

void TransitionCompletion::wait_ranges(const std::vector<Tag*>& tags,
                                       const std::vector<Range>& ranges, const CUstream* stream) {
  std::unique_lock<std::mutex> lock = await_copies(tags);
  std::vector<const Event*> events;
  uint64_t found_bytes = 0;
  for (const CopyEvents& device : events_) {
    if (const Event* event = device.last_in(ranges, &found_bytes)) events.push_back(event);
  }
  wait_for(found_bytes == total(ranges) ? events : last_events(), stream, lock);
}

std::vector<const Event*> TransitionCompletion::last_events() const {
  std::vector<const Event*> events;
  for (const CopyEvents& device : events_) {
    if (const Event* event = device.last()) events.push_back(event);
  }
  return events;
}

// Makes the stream wait for the events; if it is null, this thread waits, without the lock.
void TransitionCompletion::wait_for(const std::vector<const Event*>& events, const CUstream* stream,
                                    std::unique_lock<std::mutex>& lock) {
  if (phase_ == Phase::kDone || events.empty()) return;
  // The default stream belongs to the current context; on a thread without one, use a device of the
  // tags.
  CUcontext current = nullptr;
  std::optional<DeviceScope> scope;
  CU_CHECK(cuCtxGetCurrent, &current);
  if (!current) scope.emplace(*events.front()->context());
  if (stream) {
    for (const Event* event : events) CU_CHECK(cuStreamWaitEvent, *stream, event->get(), 0);
    return;
  }
  lock.unlock();
  for (const Event* event : events) event->wait();
  lock.lock();
  require_not_failed();
}

}  // namespace memsaver
