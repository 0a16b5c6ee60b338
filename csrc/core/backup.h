// backup: where saved bytes live on the host. It knows device addresses, nothing of tags or states.
//
// A HostBackup mirrors a heap's spans: for every byte of a span there is one host address, at the
// same distance from the start, reserved without memory. So a tensor's backup is contiguous, needs
// no bookkeeping, and takes exactly the pages of the ranges that were saved. Pages are pinned in
// cells of a fixed grid and stay pinned across cycles, until they back nothing and trim() is
// called, or other ranges are prepared.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/handles.h"
#include "core/heap.h"

namespace memsaver {

// Not thread-safe: its owner's tag is held while it changes.
class HostBackup {
 public:
  // Makes host memory ready for exactly these ranges (sorted, inside `spans`), and returns what
  // others held. Throws kOutOfHostMemory, holding no more than before; what backed earlier ranges
  // may be gone, so the caller prepares only when it needs no earlier backup any more.
  void prepare(const std::vector<VaReservation>& spans, const std::vector<Range>& ranges);

  // The host address of a device address in a prepared range.
  void* host(uint64_t address) const;

  // `ranges` cut where a piece of pinned memory ends: no copy may cross that.
  std::vector<Range> pieces(const std::vector<Range>& ranges) const;

  // Returns the memory that backs nothing of `kept` (sorted) to the system; the bytes.
  uint64_t release(const std::vector<Range>& kept);

  // Pinned bytes held.
  uint64_t held_bytes() const { return held_bytes_; }

 private:
  // Host addresses for one span; pages appear when touched.
  class Mirror {
   public:
    Mirror(uint64_t device_address, uint64_t bytes);
    ~Mirror();
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;
    bool contains(uint64_t address) const { return address - device_address_ < bytes_; }
    char* at(uint64_t address) const { return base_ + (address - device_address_); }
    uint64_t device_address() const { return device_address_; }
    uint64_t bytes() const { return bytes_; }

   private:
    uint64_t device_address_, bytes_;
    char* base_;
  };

  Mirror& mirror_of(const VaReservation& span);
  void drop(std::map<uint64_t, PinnedRange>::iterator cell);  // on a throw it is as before
  void try_drop(std::map<uint64_t, PinnedRange>::iterator cell) noexcept;

  std::vector<std::unique_ptr<Mirror>> mirrors_;
  std::map<uint64_t, PinnedRange> cells_;  // by the device address of their cell of the grid
  std::atomic<uint64_t> held_bytes_{0};    // read by statistics at any time
};

}  // namespace memsaver
