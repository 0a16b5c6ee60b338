// backup_medium: what the bytes of a backup physically lie in. It knows device addresses, nothing
// of tags, states or fingerprints.
//
// A medium mirrors a heap's spans: every device address has one place in it, at the same distance
// from the start of its span. Nothing is stored at a place until a cell around it was attached. A
// cell is a range of device addresses on boundaries of cell_unit() bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/handles.h"
#include "core/range.h"

namespace memsaver {

// write() and read() take multiples of this, and nothing smaller: what direct input and output asks
// of addresses in files and in memory.
constexpr uint64_t kMediumUnit = 4096;

// Cells begin and end on multiples of this, a multiple of kMediumUnit: the system's pages, which
// are 64 KiB on some, are pinned and given back whole.
uint64_t cell_unit();

class BackupMedium {
 public:
  virtual ~BackupMedium() = default;

  // Gives the spans their places. Throws kOutOfHostMemory for want of addresses.
  virtual void cover(const std::vector<VaReservation>& spans) = 0;

  // The steps by which a cell comes to be, each for its own bytes only:
  // claims room for `bytes` before any of it is touched. Throws kOutOfHostMemory.
  virtual void claim(uint64_t bytes) = 0;
  // makes the room of a part of a cell real, once for each: pages have memory, a file its blocks.
  // Any thread, several at once. Throws kOutOfHostMemory, kBackupFailed; then the cell is to be
  // dropped as well.
  virtual void populate(const Range& part) = 0;
  // makes it ready for copies; the calling thread is in a DeviceScope. Throws kOutOfHostMemory.
  virtual void attach(const Range& cell) = 0;
  // gives everything of it back, attached or not, and its claim. Throws kDriverFailed where the
  // memory cannot be unpinned (then the cell is as it was), kBackupFailed where a file cannot be
  // made smaller, kOutOfHostMemory where the system does not take pages back (then its contents are
  // undefined, and it may be dropped again).
  virtual void drop(const Range& cell) = 0;

  // Bytes of dropped cells that are held all the same, until the last cell is dropped: of files in
  // a file system that cannot free a part of one.
  virtual uint64_t unreturned_bytes() const { return 0; }

  // The address in host memory that devices copy from and to at full speed, or null: then bytes go
  // through write() and read(). Of an attached cell.
  virtual void* direct(uint64_t address) const = 0;
  // The address at which a CPU may read what was saved, or null.
  virtual void* view(uint64_t address) const = 0;

  // Whole units of attached cells. Any thread, several at once. Throw kBackupFailed.
  virtual void write(uint64_t address, const void* source, uint64_t bytes) = 0;
  virtual void read(uint64_t address, void* target, uint64_t bytes) = 0;
};

}  // namespace memsaver
