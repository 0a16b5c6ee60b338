// transition: a change of state under way, and the only place that writes a tag's state:
// mapped -> saving -> paused -> restoring -> mapped.
//
// Every transition has three parts: it begins under the registry's lock (who is concerned, by what
// ranges; from then on it holds the tags), runs without the lock on any thread, and commits under
// it. Either all of the tags change, on all of their devices, or none. pause.h, resume.h and swap.h
// say what each does; step.h has what they share.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/allocation.h"
#include "core/handles.h"
#include "core/registry.h"
#include "core/timeline.h"
#include "core/transfer.h"

namespace memsaver {

// One tag on one device, as the transition left it.
struct Change {
  const Tag* tag;
  int device;
  bool changed;
  uint64_t device_bytes;  // given back or taken
  uint64_t copied_bytes;
};

// What a transition is called on the timeline.
struct Label {
  explicit Label(Act act);

  Act act;
  uint64_t number;  // unlike every other's
};

class Transition {
 public:
  // One that was not run gives up: the tags are as before.
  virtual ~Transition() = default;
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;

  // Does it, once, and lets the tags go; one row for each tag and device, in the order of the call.
  // What it throws, and what state the tags are in then, say pause.h, resume.h and swap.h.
  std::vector<Change> run();

  // Who it is done for, in words, for those who meet memory that is paused. Before run(), on one
  // thread. Throws kInvalidState after it.
  void set_caller(const std::string& caller);

  // Hands the transition over from the calling thread, which began it, to another one. From now on
  // the calling thread's calls wait for it, as any thread's do. Throws kInvalidState after run().
  void hand_over();

  // How many rows run() gives.
  size_t row_count() const { return rows_.size(); }

  // How far the copies are. Any thread.
  const Progress& progress() const { return progress_; }

  // Orders work that is submitted to the stream from now on after the transition. Returns when
  // every copy is queued on the devices, or at the end. Any thread.
  // Throws kInvalidState if the transition failed, or if the wait would never end, because this
  // thread must run the transition or the running thread waits for this one.
  void wait_stream(CUstream stream);

 protected:
  Transition(std::unique_ptr<Hold> hold, std::vector<Change> rows, Act act)
      : hold_(std::move(hold)), tags_(hold_->tags()), rows_(std::move(rows)), label_(act) {}

  virtual std::vector<Change> execute() = 0;
  // The device memory that it gives back, or else takes, bytes.
  virtual uint64_t moved_bytes() const noexcept = 0;
  virtual void end(Outcome outcome) noexcept = 0;  // ends the StateChanges
  // All memory is mapped and all copies are queued: work behind the events finds the contents.
  void announce_queued(std::vector<Event> events);
  // It has failed after all: whether that had been announced.
  bool withdraw();

  std::unique_ptr<Hold> hold_;
  const std::vector<Tag*> tags_;  // the hold's tags
  std::vector<Change> rows_;
  const Label label_;
  Progress progress_;

 private:
  enum class Phase { kRunning, kQueued, kDone, kFailed };
  void enter(Phase phase);

  std::mutex mutex_;  // over the three below
  std::condition_variable changed_;
  Phase phase_ = Phase::kRunning;
  std::vector<Event> events_;
};

// Gives tags their state: kSaving or kRestoring for its life, then kPaused or kMapped once commit()
// was called, else what they had, and the mark of the thread that made it. Its owner holds the
// tags, unlocked but where it says so.
class StateChange {
 public:
  // Under the registry's lock.
  StateChange(Hold& hold, std::vector<Tag*> tags, State during, const Label& label);
  ~StateChange() { end(Outcome::kGivenUp); }
  StateChange(const StateChange&) = delete;
  StateChange& operator=(const StateChange&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }
  void commit();  // under the lock
  // It did all that it was to do, in so many seconds. Under the lock, after commit() and tally().
  void count(double seconds) noexcept;
  // `outcome` is of one that was not counted.
  void end(Outcome outcome) noexcept;
  bool is_committed() const { return committed_; }

 private:
  void set(State state);
  bool is_pausing() const { return after_ == State::kPaused; }

  Hold& hold_;
  const Label label_;
  std::vector<Tag*> tags_;
  State before_, after_;
  bool committed_ = false, counted_ = false, ended_ = false;
};

}  // namespace memsaver
