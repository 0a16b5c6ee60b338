// device_transition: performs and undoes a transition's copies and mappings on one device.
//
// The transition owns the tags' Hold. This class does not change a tag's state, a heap, or the
// meaning of a backup; the transition commits these changes. on_each_device runs the work of all
// devices concurrently; the functions marked "inside on_each_device" run on the device's own
// thread, in a DeviceScope. The other functions run on the transition's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/backup/copy_events.h"
#include "core/backup/staging.h"
#include "core/backup/transfer.h"
#include "core/driver/device.h"
#include "core/platform/status.h"
#include "core/transition/page_transfer.h"
#include "core/transition/transition_plan.h"
#include "core/transition/undo_journal.h"

namespace memsaver {

class DeviceTransition {
 public:
  DeviceTransition(Device& device, Progress& progress) : device_(device), progress_(progress) {}
  DeviceTransition(const DeviceTransition&) = delete;
  DeviceTransition& operator=(const DeviceTransition&) = delete;

  void add(Leaving& leaving) { out_.push_back(&leaving); }
  void add(Arriving& arriving) { into_.push_back(&arriving); }

  Device& device() const { return device_; }
  // Returns the tag that was being processed when the work failed, or null.
  const Tag* failed_at() const { return at_; }
  // Returns the number of bytes of new memory in the last plan.
  uint64_t new_bytes() const;

  // Plans which pages are transferred (see plan_page_transfers), and reserves room in the undo
  // journal. Throws kDriverFailed.
  void plan(bool allow_larger);
  // Removes from their pools the pages that exchange() will move. Requires the registry's lock.
  void take_pages() noexcept;
  // The type of the function that receives the events of a resume's copies.
  using Queued = std::function<void(CopyEvents)>;
  // Copies contents, transfers pages, and maps the remaining memory. Returns when all bytes have
  // arrived. In a resume, calls `queued` when all memory is mapped and all copies are queued,
  // before waiting for the last copies. Throws the errors of Save and Restore, and
  // kOutOfDeviceMemory. Called inside on_each_device.
  void exchange(const Queued& queued);

  // Removes all other pages of `out` from their pools. Requires the registry's lock.
  void take_rest() noexcept;
  // Unmaps the pages that take_rest() removed. Throws kDriverFailed. Called inside on_each_device.
  void unmap();
  // Releases the unmapped pages after all steps have succeeded. Called inside on_each_device, or
  // without a DeviceScope if the device cannot be entered.
  void release() noexcept;

  // Moves the pages and their contents back, without allocating host memory. Returns false if the
  // driver refuses a call or a backup cannot be read.
  bool undo() noexcept;
  // Completes undo(). Unless `whole` is true, the pools of `out` stay unmapped and keep their
  // contents in their backups or in unmapped pages. Allocates no host memory, because a lack of
  // host memory may have caused the failure.
  void finish_undo(bool whole) noexcept;

 private:
  void exchange_pages(const Queued& queued);
  void reserve_undo();
  void map(Arriving& to);
  void start_saves();
  void transfer_pages();
  void fill_unrestored(const Arriving& to, const Range& mapped);
  void restore_transferred();
  Save* save_of(Leaving* from) const;
  void restore(Arriving* to, const Range& mapped);

  Device& device_;
  Progress& progress_;
  std::vector<Leaving*> out_;
  std::vector<Arriving*> into_;
  PageTransferPlan plan_;
  UndoJournal journal_;
  std::map<Leaving*, std::unique_ptr<Save>> saves_;  // kept until no further step can fail
  std::map<Arriving*, std::unique_ptr<Restore>> restores_;
  std::optional<CopyEvents> events_;        // the events of a resume, until `queued` receives them
  std::unique_ptr<StagingBuffer> staging_;  // for restoring staged bytes during an undo
  bool filling_ = false;                    // fills are queued
  const Tag* at_ = nullptr;
};

// Runs call(work) for the work of each device concurrently, on one thread per device, inside a
// DeviceScope. Errors contain the tag that was being processed.
void on_each_device(const std::vector<std::unique_ptr<DeviceTransition>>& works,
                    const std::function<void(DeviceTransition&)>& call);

}  // namespace memsaver
