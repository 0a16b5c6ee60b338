#include "core/transition.h"

#include <optional>

#include "core/driver.h"

namespace memsaver {

std::vector<Change> Transition::run() {
  if (!hold_) throw Error(Status::kInvalidState, "the transition was run already");
  const auto let_go = [this](Phase phase) {
    end();
    hold_.reset();  // whoever keeps this object keeps nobody waiting
    enter(phase);
  };
  try {
    std::vector<Change> rows = execute();
    let_go(Phase::kDone);
    return rows;
  } catch (...) {
    let_go(Phase::kFailed);
    throw;
  }
}

void Transition::set_caller(const std::string& caller) {
  if (!hold_) throw Error(Status::kInvalidState, "the transition was run already");
  const auto text = std::make_shared<const std::string>(caller);
  hold_->lock();
  for (Tag* tag : hold_->tags()) tag->changing.caller = text;
  hold_->unlock();
}

void Transition::enter(Phase phase) {
  std::lock_guard<std::mutex> lock(mutex_);
  phase_ = phase;
  changed_.notify_all();
}

void Transition::announce_queued(std::vector<Event> events) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_ = std::move(events);
  phase_ = Phase::kQueued;
  changed_.notify_all();
}

bool Transition::withdraw() {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool announced = phase_ == Phase::kQueued;
  phase_ = Phase::kFailed;
  changed_.notify_all();
  return announced;
}

void Transition::wait_stream(CUstream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return phase_ != Phase::kRunning; });
  if (phase_ == Phase::kFailed) {
    throw Error(Status::kInvalidState,
                "the transition failed, so there is nothing to wait for on a stream: wait for it "
                "on the host to see why");
  }
  if (phase_ == Phase::kDone || events_.empty()) return;
  // The default stream is the current context's: on a thread without one, a device's of ours.
  CUcontext current = nullptr;
  std::optional<DeviceScope> scope;
  CU_CHECK(cuCtxGetCurrent, &current);
  if (!current) scope.emplace(*events_.front().device());
  for (const Event& event : events_) CU_CHECK(cuStreamWaitEvent, stream, event.get(), 0);
}

StateChange::StateChange(Hold& hold, std::vector<Tag*> tags, State during)
    : hold_(hold), tags_(std::move(tags)) {
  const bool pausing = during == State::kSaving;
  before_ = pausing ? State::kMapped : State::kPaused;
  after_ = pausing ? State::kPaused : State::kMapped;
  const Mark mark = Mark::now();
  for (Tag* tag : tags_) tag->changing = mark;
  set(during);
}

void StateChange::end() noexcept {
  if (ended_) return;
  ended_ = true;
  if (committed_) return;
  hold_.lock();
  set(before_);
  hold_.unlock();
}

void StateChange::commit() {
  const double now = Mark::now().at_seconds;
  for (Tag* tag : tags_) {
    tag->changed = std::move(tag->changing);
    tag->changed.at_seconds = now;
  }
  set(after_);
  committed_ = true;
}

void StateChange::set(State state) {
  for (Tag* tag : tags_) {
    tag->state = state;
    tag->accepting.store(state == State::kMapped, std::memory_order_release);
  }
}

}  // namespace memsaver
