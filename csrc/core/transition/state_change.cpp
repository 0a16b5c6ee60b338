#include "core/transition/state_change.h"

#include <atomic>
#include <utility>

namespace memsaver {

TransitionLabel::TransitionLabel(Act act) : act(act) {
  static std::atomic<uint64_t> last{0};
  number = ++last;
}

StateChange::StateChange(Hold& hold, std::vector<Tag*> tags, State during,
                         const TransitionLabel& label)
    : hold_(hold), label_(label), tags_(std::move(tags)) {
  const bool pausing = during == State::kSaving;
  before_ = pausing ? State::kMapped : State::kPaused;
  after_ = pausing ? State::kPaused : State::kMapped;
  const TransitionRecord now = TransitionRecord::now();
  for (Tag* tag : tags_) tag->current_transition = now;
  set(during);
  for (const Tag* tag : tags_) timeline::note_begin(*tag, label_.act, label_.number, now);
}

void StateChange::end(Outcome outcome) noexcept {
  if (ended_) return;
  ended_ = true;
  if (counted_) return;
  hold_.lock();
  if (!committed_) set(before_);
  for (Tag* tag : tags_) {
    if (outcome == Outcome::kFailed) ++tag->failures;
    const TransitionRecord& origin = committed_ ? tag->last_transition : tag->current_transition;
    timeline::note_end(*tag, label_.act, label_.number, origin, outcome, is_pausing());
  }
  hold_.unlock();
}

void StateChange::commit() noexcept {
  const double now = TransitionRecord::now().at_seconds;
  for (Tag* tag : tags_) {
    tag->last_transition = std::move(tag->current_transition);
    tag->last_transition.at_seconds = now;
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
    timeline::note_end(*tag, label_.act, label_.number, tag->last_transition, Outcome::kDone,
                       is_pausing());
  }
}

void StateChange::set(State state) noexcept {
  for (Tag* tag : tags_) {
    tag->state = state;
    tag->accepting.store(state == State::kMapped, std::memory_order_release);
  }
}

}  // namespace memsaver
