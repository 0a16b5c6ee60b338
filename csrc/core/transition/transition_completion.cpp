#include "core/transition/transition_completion.h"

#include <optional>
#include <utility>

#include "core/driver/driver.h"
#include "core/memory/reservation.h"

namespace memsaver {

void TransitionCompletion::set_queued(std::vector<Event> events) {
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

void TransitionCompletion::wait_stream(const std::vector<Tag*>& tags, CUstream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (phase_ == Phase::kRunning) {
    lock.unlock();
    const WaitsForTransition declared(tags);
    lock.lock();
    changed_.wait(lock, [this] { return phase_ != Phase::kRunning; });
    lock.unlock();  // before `declared` takes the registry's
  }
  if (!lock.owns_lock()) lock.lock();
  if (phase_ == Phase::kFailed) {
    throw Error(Status::kInvalidState,
                "the transition failed, so there is nothing to wait for on a stream: wait for it "
                "on the host to see why");
  }
  if (phase_ == Phase::kDone || events_.empty()) return;
  // The default stream belongs to the current context; on a thread without one, use a device of the
  // tags.
  CUcontext current = nullptr;
  std::optional<DeviceScope> scope;
  CU_CHECK(cuCtxGetCurrent, &current);
  if (!current) scope.emplace(*events_.front().context());
  for (const Event& event : events_) CU_CHECK(cuStreamWaitEvent, stream, event.get(), 0);
}

}  // namespace memsaver
