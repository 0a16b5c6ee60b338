// transition: pauses the tags in `out` and resumes the tags in `into`, either all of them or none,
// on all of their devices.
//
// Every transition has three parts. It begins under the registry's lock, where it acquires the tags
// and then plans the leaving and arriving pools (transition_plan.h). It runs without the lock, on
// any thread. Finally, it commits under the lock. In a pause no tag arrives, and in a resume no tag
// leaves.
//
// The work of all devices (device_transition.h) runs concurrently. First, contents are saved. Each
// page that the plan assigns to an arriving tag (page_transfer.h) is transferred as soon as its
// bytes are saved. Memory is mapped and contents are restored piece by piece. The remaining pages
// are unmapped, and are released at the end.
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
  // Waits until a transition of the tags can begin (Need::kTransition), then begins it. Tags in
  // `out` that are already paused and tags in `into` that are already mapped are not changed.
  // Errors: kUnknownTag; kInvalidState if a region of a tag in `out` is open or the wait would
  // deadlock; kInvalidArgument if a tag is in both lists or there are no tags.
  static std::unique_ptr<Transition> begin(const TransitionRequest& request);

  // Destroying a transition that has not run cancels it and leaves the tags unchanged.
  ~Transition() = default;
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;

  // Runs the transition and releases the tags. May be called only once. Returns one row for each
  // tag and device, in the order of the request. If tags in `out` have memory, waits for all work
  // previously submitted to the devices.
  //
  // Errors: kOutOfDeviceMemory, kOutOfHostMemory, kBackupFailed, kDriverFailed.
  // After an error, every tag in `out` is mapped and has its contents, and every tag in `into` is
  // paused, has its backup and uses no device memory. This guarantee has two exceptions:
  //   - If `into` has tags, the contents of tags in `out` without a backup may be lost, because
  //     other contents overwrote them.
  //   - If the rollback also fails, because the driver refuses a call or a backup cannot be read,
  //     the tags in `out` are paused. Their contents are in their backups, in retained unmapped
  //     pages or in pages that are still mapped. A resume restores all of these contents.
  std::vector<Change> run();

  // Waits for work on the devices in advance, so that run() does not wait. A wait in run() would
  // include the copies of other transitions. Throws kDriverFailed.
  void drain();

  // Ends a transition that has not run, leaving the tags unchanged. Calls that wait for the
  // transition fail.
  void cancel() noexcept;

  // Sets the description of the caller, which errors report after an access to paused memory. Must
  // be called before run(), on one thread at a time. Throws kInvalidState after run().
  void set_caller(const std::string& caller);

  // Transfers the transition from the calling thread, which began it, to another thread.
  // Afterwards, calls on the calling thread wait for the transition like calls on any other thread.
  // Throws kInvalidState after run().
  void hand_over();

  // The number of rows that run() returns.
  size_t row_count() const { return rows_.size(); }

  // The progress of the copies. Any thread.
  const Progress& progress() const { return progress_; }

  // Makes work that is submitted to the stream after this call wait for the transition. Returns
  // when all copies of a resume are queued on the devices, or when the transition has ended. Any
  // thread. Throws kInvalidState if the transition failed, or if the wait would deadlock because
  // this thread must run the transition or because the thread that runs it is waiting for this
  // thread.
  void wait_stream(CUstream stream);
  // Like wait_stream(), but the work waits only for the contents of some addresses of a resume,
  // that is, for the copies into these addresses and the copies queued before them. If an address
  // is outside the memory that is being resumed, the work waits for all copies. If `stream` is
  // null, this thread waits instead. Throws the errors of wait_stream(), and kDriverFailed.
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
