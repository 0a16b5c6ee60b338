// host_backing_store: backups in host memory, pinned or pageable.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backup/backing_store.h"
#include "core/driver/device.h"
#include "core/driver/pinned_memory.h"
#include "core/platform/host_budget.h"

namespace memsaver {

// A backing store whose places are host addresses that are reserved without memory. Pages are
// allocated near the device's NUMA node, as huge pages if the system allows them. Devices copy to
// and from a pinned backing store directly; a pageable backing store is ordinary memory. Forked
// children do not inherit the memory.
class HostBackingStore : public BackingStore {
 public:
  enum class Kind { kPinned, kPageable };
  // The memory is pinned for `device`, preferably on its NUMA node.
  HostBackingStore(Kind kind, const Device& device) : kind_(kind), device_(device) {}
  // Any thread may destroy the store, inside or outside a DeviceScope. Pages that the driver
  // refuses to unpin stay claimed until a retry succeeds (deferred_release.h).
  ~HostBackingStore() override;

  void cover(const std::vector<VaReservation>& spans) override;
  void claim(const std::vector<Range>& chunks) override;
  void populate(const Range& part) override;
  void attach(const Range& chunk) override;
  void drop(const Range& chunk) override;
  void* direct(uint64_t address) const override;
  void* view(uint64_t address) const override { return place(address); }
  void write(uint64_t address, const void* source, uint64_t bytes) override;
  void read(uint64_t address, void* target, uint64_t bytes) override;

 private:
  // The host addresses for one span; pages are allocated when they are touched.
  class Mirror {
   public:
    Mirror(uint64_t device_address, uint64_t bytes, int node);
    ~Mirror() { leave(base_ + bytes_, 0); }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;
    bool contains(uint64_t address) const { return address - device_address_ < bytes_; }
    char* at(uint64_t address) const { return base_ + (address - device_address_); }
    uint64_t device_address() const { return device_address_; }
    // Leaves a range's pages mapped for another owner, and unmaps the mirror's remaining pages at
    // lower addresses. Must be called with ranges in ascending order; afterwards, the mirror can
    // only be destroyed.
    void leave(char* start, uint64_t bytes) noexcept;

   private:
    uint64_t device_address_, bytes_;
    char* base_;
    char* begin_;  // the first page that the destructor unmaps
  };

  char* place(uint64_t address) const;

  const Kind kind_;
  const Device& device_;
  std::vector<std::unique_ptr<Mirror>> mirrors_;
  HostClaim claim_;
  std::mutex mutex_;                         // guards the next
  std::map<uint64_t, uint64_t> populated_;   // populated parts of chunks: address -> bytes
  std::map<uint64_t, PinnedMemory> pinned_;  // by the chunk's address
};

}  // namespace memsaver
