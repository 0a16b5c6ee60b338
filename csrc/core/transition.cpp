#include "core/transition.h"

#include <optional>

#include "core/driver.h"
#include "core/text.h"

namespace memsaver {

Label::Label(Act act) : act(act) {
  static std::atomic<uint64_t> last{0};
  number = ++last;
}

namespace {

const char* name_of(Act act) {
  switch (act) {
    case Act::kPause:
      return "pause";
    case Act::kResume:
      return "resume";
    default:
      return "swap";
  }
}

// Adds the tags and bytes of a transition to the message of an error that names no tag, such as a
// driver call's. Needs host memory; without it the message stays as it is.
void add_context(Error& error, Act act, const std::vector<Tag*>& tags, uint64_t bytes) noexcept {
  if (error.message.empty()) return;  // for want of memory: marshal.cpp writes a message then
  try {
    std::vector<std::string> names;
    for (const Tag* tag : tags) names.push_back(tag->name);
    for (const std::string& name : names) {
      if (error.message.find(quoted(name)) != std::string::npos) return;
    }
    error.message += std::string("; the ") + name_of(act) + " of " + format_names(names) + ", " +
                     format_bytes(bytes) + ", failed";
    if (error.addition[0] == 0) error.message += " and was undone: it can be tried again";
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace

std::vector<Change> Transition::run() {
  if (!hold_) throw Error(Status::kInvalidState, "the transition was run already");
  const auto let_go = [this](Phase phase) {
    end(Outcome::kFailed);
    hold_.reset();  // whoever keeps this object keeps nobody waiting
    enter(phase);
    timeline::note_memory();
  };
  hold_->lock();
  hold_->set_owner(this_thread());
  hold_->unlock();
  timeline::note_memory();
  try {
    std::vector<Change> rows = execute();
    let_go(Phase::kDone);
    return rows;
  } catch (Error& error) {
    let_go(Phase::kFailed);
    add_context(error, label_.act, tags_, moved_bytes());
    throw;
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

void Transition::hand_over() {
  if (!hold_) throw Error(Status::kInvalidState, "the transition was run already");
  hold_->lock();
  hold_->set_owner(0);
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
  if (phase_ == Phase::kRunning) {
    lock.unlock();
    const WaitsForTransition declared(tags_);
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
  // The default stream is the current context's: on a thread without one, a device's of ours.
  CUcontext current = nullptr;
  std::optional<DeviceScope> scope;
  CU_CHECK(cuCtxGetCurrent, &current);
  if (!current) scope.emplace(*events_.front().device());
  for (const Event& event : events_) CU_CHECK(cuStreamWaitEvent, stream, event.get(), 0);
}

StateChange::StateChange(Hold& hold, std::vector<Tag*> tags, State during, const Label& label)
    : hold_(hold), label_(label), tags_(std::move(tags)) {
  const bool pausing = during == State::kSaving;
  before_ = pausing ? State::kMapped : State::kPaused;
  after_ = pausing ? State::kPaused : State::kMapped;
  const Mark mark = Mark::now();
  for (Tag* tag : tags_) tag->changing = mark;
  set(during);
  for (const Tag* tag : tags_) timeline::note_begin(*tag, label_.act, label_.number, mark);
}

void StateChange::end(Outcome outcome) noexcept {
  if (ended_) return;
  ended_ = true;
  if (counted_) return;
  hold_.lock();
  if (!committed_) set(before_);
  for (Tag* tag : tags_) {
    if (outcome == Outcome::kFailed) ++tag->failures;
    const Mark& mark = committed_ ? tag->changed : tag->changing;
    timeline::note_end(*tag, label_.act, label_.number, mark, outcome, is_pausing());
  }
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

void StateChange::count(double seconds) noexcept {
  counted_ = true;
  for (Tag* tag : tags_) {
    ++(is_pausing() ? tag->pauses : tag->resumes);
    (is_pausing() ? tag->last_pause_seconds : tag->last_resume_seconds) = seconds;
    (is_pausing() ? tag->pause_seconds : tag->resume_seconds) += seconds;
    timeline::note_end(*tag, label_.act, label_.number, tag->changed, Outcome::kDone, is_pausing());
  }
}

void StateChange::set(State state) {
  for (Tag* tag : tags_) {
    tag->state = state;
    tag->accepting.store(state == State::kMapped, std::memory_order_release);
  }
}

}  // namespace memsaver
