// state_change: the states of tags during a transition, and the only place that writes them:
// mapped -> saving -> paused -> restoring -> mapped.
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

// Sets tags to kSaving or kRestoring while it exists; afterwards to kPaused or kMapped if commit()
// was called, otherwise to their former state. Records the transition with the tags and on the
// timeline. The caller owns the tags' Hold, and locks the registry only for the functions that
// require it.
class StateChange {
 public:
  // Under the registry's lock.
  StateChange(Hold& hold, std::vector<Tag*> tags, State during, const TransitionLabel& label);
  ~StateChange() { end(Outcome::kGivenUp); }
  StateChange(const StateChange&) = delete;
  StateChange& operator=(const StateChange&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }
  bool is_committed() const { return committed_; }

  // Under the lock.
  void commit() noexcept;
  // Counts a successful transition. Under the lock, after commit(), when the pools' counters are up
  // to date.
  void count(double seconds) noexcept;
  // Ends the change; calls after the first do nothing. `outcome` applies to a transition that was
  // not counted. Takes the lock.
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
