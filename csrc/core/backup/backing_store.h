// backing_store: the physical storage of a backup. It handles device addresses only, not tags,
// states or fingerprints.
//
// A backing store mirrors a heap's spans: every device address has one place in it, at the same
// offset from the start of its span. Nothing is stored at a place until a chunk around it is
// attached. A chunk is a range of device addresses on boundaries of chunk_unit() bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/driver/handles.h"
#include "core/platform/range.h"

namespace memsaver {

// Offsets, sizes and buffers of write() and read() are multiples of this, as direct I/O requires.
constexpr uint64_t kBackingUnit = 4096;

// Chunk boundaries are multiples of this, which is a multiple of kBackingUnit, because whole pages,
// which are 64 KiB on some systems, are pinned and released.
uint64_t chunk_unit();

class BackingStore {
 public:
  virtual ~BackingStore() = default;

  // Reserves places for the spans. Throws kOutOfHostMemory if no addresses are left.
  virtual void cover(const std::vector<VaReservation>& spans) = 0;

  // The next three calls, in this order, create backup chunks. claim() counts the chunks against
  // the host budget before any page is touched (a store on disk claims in populate()); a store on
  // another device allocates its memory. Throws kOutOfHostMemory; a store on another device also
  // throws kBadConfig, kDriverFailed. If it throws, nothing is claimed.
  virtual void claim(const std::vector<Range>& chunks) = 0;
  // Allocates the storage of a part of a chunk, once for each part: memory pages, or blocks of the
  // file. Thread-safe. Throws kOutOfHostMemory, kBackupFailed; the caller must then
  // drop the chunk.
  virtual void populate(const Range& part) = 0;
  // Prepares the chunk for copies. Call inside a DeviceScope. Throws kOutOfHostMemory.
  virtual void attach(const Range& chunk) = 0;
  // Releases a chunk, attached or not, and its claim. Throws kDriverFailed if the memory cannot be
  // unpinned (the chunk is unchanged); kBackupFailed if a file cannot be shrunk; kOutOfHostMemory
  // if the system refuses to release pages (the contents are undefined, and the chunk may be
  // dropped again).
  virtual void drop(const Range& chunk) = 0;

  // Bytes of dropped chunks that stay allocated until the last chunk is dropped, because the file
  // system cannot free part of a file.
  virtual uint64_t unreturned_bytes() const { return 0; }

  // The bytes of another device's memory that contain a chunk; 0 for a chunk in host memory or a
  // file.
  virtual uint64_t peer_bytes(const Range&) const { return 0; }
  // The address in another device's memory that the device copies from and to, in an attached
  // chunk. 0 if the place is elsewhere.
  virtual uint64_t peer(uint64_t) const { return 0; }
  // The address in host memory that devices copy from and to at full speed, in an attached chunk.
  // Null if bytes must be copied by write() and read(), and undefined if peer() is not 0.
  virtual void* direct(uint64_t address) const = 0;
  // The address at which a CPU may read the saved bytes, or null.
  virtual void* view(uint64_t address) const = 0;

  // Copy whole units of attached chunks. Thread-safe. Throw kBackupFailed.
  virtual void write(uint64_t address, const void* source, uint64_t bytes) = 0;
  virtual void read(uint64_t address, void* target, uint64_t bytes) = 0;
};

}  // namespace memsaver
