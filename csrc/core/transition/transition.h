// transition: pauses the tags of `out` and resumes the tags of `into`, all of them or none, on all
// of their devices.
//
// Every transition has three parts. It begins under the registry's lock: the leaving and arriving
// pools are planned (transition_plan.h), and after that it owns the tags. It runs without the
// lock, on any thread. It commits under the lock. In a pause no tag arrives, and in a resume none
// leaves.
//
// The work of each device (device_transition.h) runs concurrently: contents are saved; pages that
// fit are transferred from leaving to arriving tags, one by one, as soon as their bytes are saved;
// memory is mapped and contents are restored piece by piece; the remaining pages are unmapped, and
// released at the end.
#pragma once

#include <cuda.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/backup/transfer.h"
#include "core/memory/allocation.h"
#include "core/transition/device_transition.h"
#include "core/transition/state_change.h"
#include "core/transition/transition_completion.h"
#include "core/transition/transition_plan.h"

namespace memsaver {

class Transition {
 public:
  // Waits until the tags are free (Need::kTransition), then begins. Tags of `out` that are paused
  // and tags of `into` that are mapped are left as they are.
  // Errors: kUnknownTag; kInvalidState (an open region of a tag of `out`, or a wait that would
  // never end); kInvalidArgument (a tag in both, or no tag).
  static std::unique_ptr<Transition> begin(const TransitionRequest& request);

  // Destroying a transition that has not run cancels it and leaves the tags unchanged.
  ~Transition() = default;
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;

  // Runs the transition, once, and releases the tags. Returns one row for each tag and device, in
  // the order of the request. If `out` has memory, waits for all work submitted earlier to the
  // devices.
  //
  // Errors: kOutOfDeviceMemory, kOutOfHostMemory, kBackupFailed, kDriverFailed.
  // After an error every tag of `out` is mapped with its contents, and every tag of `into` is
  // paused with its backup and uses no memory. There are two exceptions:
  //   - The contents of tags of `out` without a backup may be lost if `into` has tags: other
  //     contents overwrote them.
  //   - If undoing also fails, because the driver refuses a call or a backup cannot be read, the
  //     tags of `out` are paused. Their contents are in their backups, in retained unmapped pages
  //     or in pages that are still mapped, and a resume restores all of them.
  std::vector<Change> run();

  // Waits for the devices' work in advance, so that run() need not: a later wait would include the
  // copies of other transitions. Throws kDriverFailed.
  void drain();

  // Ends a transition that has not run; waits for it fail. The tags are unchanged.
  void cancel() noexcept;

  // Sets the description of the caller that errors report after an access to paused memory. Call
  // before run(), on one thread. Throws kInvalidState after run().
  void set_caller(const std::string& caller);

  // Hands the transition over from the calling thread, which began it, to another one.
  // Afterwards the calling thread's calls wait for it, like those of any other thread. Throws
  // kInvalidState after run().
  void hand_over();

  // The number of rows that run() returns.
  size_t row_count() const { return rows_.size(); }

  // The progress of the copies. Any thread.
  const Progress& progress() const { return progress_; }

  // Makes work that is submitted to the stream after this call wait for the transition. Returns
  // when all copies of a resume are queued on the devices, or when the transition has ended. Any
  // thread. Throws kInvalidState if the transition failed, or if the wait would deadlock, because
  // this thread must run the transition or the running thread waits for this one.
  void wait_stream(CUstream stream);
  // Like wait_stream(), but the work waits only for the contents of some addresses of a resume: for
  // the copies into them and those queued before. If an address does not belong to the resume,
  // waits for all copies. If `stream` is null, this thread waits. Throws like wait_stream(), and
  // kDriverFailed.
  void wait_ranges(const std::vector<Range>& ranges, const CUstream* stream);

 private:
  Transition(std::unique_ptr<Hold> hold, TransitionPlan plan);

  void require_not_run() const;
  void execute();
  void prepare_stores();
  void move_all();
  void move_or_undo(bool allow_larger);
  void distrust_backups() noexcept;
  void move(bool allow_larger);
  void release() noexcept;
  void commit() noexcept;
  bool undo() noexcept;
  void fill_rows() noexcept;
  uint64_t moved_bytes() const noexcept;
  Error shortage(const Error& refusal) const;
  void add_context(Error& error) const noexcept;
  void end(bool succeeded) noexcept;

  std::unique_ptr<Hold> hold_;
  const std::vector<Tag*> tags_;  // the tags of hold_
  const TransitionLabel label_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  StateChange pausing_, resuming_;
  std::vector<Change> rows_;
  std::vector<Leaving> out_;
  std::vector<Arriving> into_;
  bool is_drained_ = false;
  Progress progress_;
  std::vector<std::unique_ptr<DeviceTransition>> devices_;
  TransitionCompletion completion_;
};

}  // namespace memsaver
