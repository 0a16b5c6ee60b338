// state_change: the states of tags during a transition: mapped -> saving -> paused -> restoring ->
// mapped. No other unit writes these states.
#pragma once

#include <vector>

#include "core/memory/allocation.h"
#include "core/memory/registry.h"
#include "core/memory/timeline.h"

namespace memsaver {

// Identifies a transition on the timeline.
struct TransitionLabel {
  explicit TransitionLabel(Act act);

  Act act;
  uint64_t number;  // unique in the process
};

// While a StateChange exists, its tags are in state kSaving or kRestoring. Afterwards, they are in
// state kPaused or kMapped if commit() was called, otherwise in their former state. Records the
// transition in the tags and on the timeline. The caller owns the tags' Hold, and locks the
// registry only for the functions that require its lock.
class StateChange {
 public:
  // Requires the registry's lock.
  StateChange(Hold& hold, std::vector<Tag*> tags, State during, const TransitionLabel& label);
  ~StateChange() { end(Outcome::kGivenUp); }
  StateChange(const StateChange&) = delete;
  StateChange& operator=(const StateChange&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }
  bool is_committed() const { return committed_; }

  // Requires the registry's lock.
  void commit() noexcept;
  // Counts a successful transition. Called under the lock, after commit(), when the pools' counters
  // are up to date.
  void count(double seconds) noexcept;
  // Ends the change; only the first call has an effect. `outcome` applies to a transition that was
  // not counted. Acquires the lock.
  void end(Outcome outcome) noexcept;

 private:
  void set(State state) noexcept;
  bool is_pausing() const { return after_ == State::kPaused; }

  Hold& hold_;
  const TransitionLabel label_;
  const std::vector<Tag*> tags_;
  State before_, after_;
  bool committed_ = false, counted_ = false, ended_ = false;
};

}  // namespace memsaver
