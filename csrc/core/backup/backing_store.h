// backing_store: the physical storage of a backup. A backing store handles only device addresses,
// not tags, states or fingerprints.
//
// A backing store mirrors a heap's spans: every device address has one place in the store, at the
// same offset from the start of its span. Data can be stored at a place only once a chunk that
// contains the place has been attached. A chunk is a range of device addresses on boundaries of
// chunk_unit() bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/driver/handles.h"
#include "core/platform/range.h"

namespace memsaver {

// Offsets, sizes and buffer addresses of write() and read() are multiples of this number, as direct
// I/O requires.
constexpr uint64_t kBackingUnit = 4096;

// Returns the unit of chunk boundaries, which is a multiple of kBackingUnit. Chunks consist of
// whole pages, which are 64 KiB on some systems, because only whole pages can be pinned and
// released.
uint64_t chunk_unit();

class BackingStore {
 public:
  virtual ~BackingStore() = default;

  // Reserves places for the spans. Throws kOutOfHostMemory if no addresses are available.
  virtual void cover(const std::vector<VaReservation>& spans) = 0;

  // The next three functions, called in this order, create backup chunks. claim() counts the chunks
  // against the host budget before any page is touched. A store on disk instead claims space in
  // populate(), and a store on another device allocates memory in claim(). Throws kOutOfHostMemory;
  // a store on another device also throws kBadConfig and kDriverFailed. If claim() throws, no chunk
  // is claimed.
  virtual void claim(const std::vector<Range>& chunks) = 0;
  // Allocates the storage of one part of a chunk: memory pages or blocks of the file. Called once
  // for each part. Thread-safe. Throws kOutOfHostMemory and kBackupFailed; the caller must then
  // drop the chunk.
  virtual void populate(const Range& part) = 0;
  // Prepares the chunk for copies. Call inside a DeviceScope. Throws kOutOfHostMemory.
  virtual void attach(const Range& chunk) = 0;
  // Releases a chunk, whether attached or not, and its claim. Throws kDriverFailed if the memory
  // cannot be unpinned; the chunk is then unchanged. Throws kBackupFailed if a file cannot be
  // shrunk. Throws kOutOfHostMemory if the system refuses to release pages; the contents are then
  // undefined, and the chunk may be dropped again.
  virtual void drop(const Range& chunk) = 0;

  // Returns the number of bytes of dropped chunks that stay allocated until the last chunk is
  // dropped, because the file system cannot free part of a file.
  virtual uint64_t unreturned_bytes() const { return 0; }

  // Returns the number of bytes that a chunk occupies in another device's memory, or 0 for a chunk
  // in host memory or a file.
  virtual uint64_t peer_bytes(const Range&) const { return 0; }
  // Returns the address in another device's memory that the device copies from and to, or 0 if the
  // place is not on another device. The chunk must be attached.
  virtual uint64_t peer(uint64_t) const { return 0; }
  // Returns the address in host memory that devices copy from and to at full speed, or null if
  // bytes must be copied with write() and read(). The result is undefined if peer() is not 0. The
  // chunk must be attached.
  virtual void* direct(uint64_t address) const = 0;
  // Returns the address at which the CPU can read the saved bytes, or null.
  virtual void* view(uint64_t address) const = 0;

  // These functions copy whole units of attached chunks. Thread-safe. They throw kBackupFailed.
  virtual void write(uint64_t address, const void* source, uint64_t bytes) = 0;
  virtual void read(uint64_t address, void* target, uint64_t bytes) = 0;
};

}  // namespace memsaver
