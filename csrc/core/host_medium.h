// host_medium: backups in host memory, pinned or pageable.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backup_medium.h"
#include "core/host_budget.h"

namespace memsaver {

// Places are host addresses reserved without memory, near a NUMA node, in huge pages where the
// system allows it. A pinned medium is copied to and from directly; a pageable one is ordinary
// memory. Forked children do not inherit it.
class HostMedium : public BackupMedium {
 public:
  enum class Kind { kPinned, kPageable };
  // `node`: the NUMA node of the device, or -1.
  HostMedium(Kind kind, int node) : kind_(kind), node_(node) {}
  // Pages that cannot be unpinned stay, and stay claimed: they must not become somebody else's.
  ~HostMedium() override;

  void cover(const std::vector<VaReservation>& spans) override;
  void claim(uint64_t bytes) override;
  void populate(const Range& part) override;
  void attach(const Range& cell) override;
  void drop(const Range& cell) override;
  void* direct(uint64_t address) const override;
  void* view(uint64_t address) const override { return place(address); }
  void write(uint64_t address, const void* source, uint64_t bytes) override;
  void read(uint64_t address, void* target, uint64_t bytes) override;

 private:
  // Host addresses for one span; pages appear when touched.
  class Mirror {
   public:
    Mirror(uint64_t device_address, uint64_t bytes, int node);
    ~Mirror();
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;
    bool contains(uint64_t address) const { return address - device_address_ < bytes_; }
    char* at(uint64_t address) const { return base_ + (address - device_address_); }
    uint64_t device_address() const { return device_address_; }

   private:
    uint64_t device_address_, bytes_;
    char* base_;
  };

  char* place(uint64_t address) const;

  const Kind kind_;
  const int node_;
  std::vector<std::unique_ptr<Mirror>> mirrors_;
  HostClaim claim_;
  std::mutex mutex_;                        // over the next
  std::map<uint64_t, uint64_t> populated_;  // parts of cells that have pages: address -> bytes
  std::map<uint64_t, PinnedRange> pinned_;  // by the cell's address
};

}  // namespace memsaver
