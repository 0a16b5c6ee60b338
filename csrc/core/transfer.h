// transfer: moves bytes between devices and their host backups.
#pragma once

#include <memory>
#include <vector>

#include "core/backup.h"
#include "core/device.h"
#include "core/heap.h"

namespace memsaver {

// Copies queued on the devices' copy streams, which run side by side. Used by one thread, whose
// current context is one of the devices' until the end; the
// ranges and the host memory must stay as they are until wait() has returned or the object is gone.
class Transfer {
 public:
  Transfer() = default;
  ~Transfer();  // waits for what is queued
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Queue copies of `ranges` to the prepared backup, or back. Return the bytes queued; throw
  // kDriverFailed.
  uint64_t save(Device& device, const HostBackup& backup, const std::vector<Range>& ranges);
  uint64_t restore(Device& device, const HostBackup& backup, const std::vector<Range>& ranges);

  // Returns when everything queued has arrived. Throws kDriverFailed.
  void wait();

 private:
  enum class Direction { kToHost, kToDevice };
  uint64_t queue(Device& device, const HostBackup& backup, const std::vector<Range>& ranges,
                 Direction direction);

  // A device with copies queued, and its context until they are done: to wait must not depend on a
  // call that could be refused.
  struct Busy {
    Device* device;
    std::unique_ptr<DeviceScope> scope;
  };
  void let_go() noexcept;

  std::vector<Busy> busy_;  // contexts are pushed in this order, and popped from the back
};

}  // namespace memsaver
