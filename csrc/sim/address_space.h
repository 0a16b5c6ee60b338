// Virtual addresses: reservations, mappings of physical memory into reservations, and access
// rights.
//
// A reservation is address space with protection PROT_NONE. A mapping is a shared mapping of a part
// of the device's file into a reservation; its protection is PROT_NONE until access is set. Two
// mappings of the same memory are therefore aliases, and a host access to unmapped or inaccessible
// memory faults. cuMemAlloc's blocks are mappings without a reservation and are accessible from the
// start. These blocks are in chunks, and blocks smaller than kGranularity share chunks.
//
// The caller of every function must own State::mutex (state.h). A function that returns an error
// has no effect.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "device_memory.h"

namespace memsaver::sim {

// The device argument of an access check that succeeds if any device has access. In that case, the
// host also has access.
constexpr int kAnyDevice = -1;

struct Range {
  uint64_t address = 0;
  uint64_t size = 0;

  uint64_t end() const { return address + size; }
  bool overlaps(const Range& other) const { return address < other.end() && other.address < end(); }
  bool contains(const Range& other) const {
    return address <= other.address && other.end() <= end();
  }
};

struct Mapping {
  Range range;
  std::shared_ptr<PhysicalMemory> memory;
  uint64_t offset = 0;           // the range's offset in the memory; 0 except for blocks
  uint64_t id = 0;               // the memory's id, or the block's own; unique in a process
  bool from_alloc = false;       // a block of cuMemAlloc: every device may access it
  std::vector<unsigned> access;  // CUmemAccess_flags by device ordinal

  bool allows(int device, bool write) const;
};

// A part of a mapping, described as a part of the mapping's physical memory. Keeps that memory
// alive.
struct Piece {
  std::shared_ptr<PhysicalMemory> memory;
  uint64_t offset = 0;  // within the memory
  uint64_t size = 0;
};

class AddressSpace {
 public:
  // Reserves addresses. Arguments are multiples of granularity(); an `alignment` of 0 means
  // granularity(). The range is reserved at `hint` if these addresses are free and aligned.
  CUresult reserve(uint64_t size, uint64_t alignment, uint64_t hint, uint64_t* address);
  // Frees a reservation. The range must be exactly one reservation without mappings.
  CUresult free(Range range);

  // Maps all of `memory`. The range must be inside one reservation or several adjacent
  // reservations, and must be unmapped.
  CUresult map(Range range, std::shared_ptr<PhysicalMemory> memory);
  // Removes all mappings in a reserved range. The range need not contain a mapping, but no mapping
  // may extend beyond it.
  CUresult unmap(Range range);
  // Sets access rights. The range must begin at a mapping and must not split a mapping. The range
  // is processed only up to the first hole; a hole is not an error. `descriptions` replace the
  // access rights of the devices that they name.
  CUresult set_access(Range range, const CUmemAccessDesc* descriptions, size_t count,
                      int device_count);

  // Allocates a block for cuMemAlloc with `size` bytes (rounded up) and the id `id`.
  CUresult allocate(DeviceMemory* device, uint64_t size, uint64_t id, uint64_t* address);
  CUresult free_block(uint64_t address);
  void free_blocks_of(int device);

  // Returns the mapping or block that contains `address`, or null if there is none.
  const Mapping* find(uint64_t address) const;
  // Writes the pieces of the range to `out`, in order. Returns false if a byte is unmapped, or if
  // `device` does not have the required access.
  bool pieces(Range range, int device, bool write, std::vector<Piece>* out) const;
  // Returns the reservation that contains `address`, or an empty range if there is none.
  Range reservation(uint64_t address) const;
  // Returns whether the address is reserved or in a chunk, regardless of whether it is mapped.
  bool owns(uint64_t address) const;

  uint64_t reservation_count() const { return reservations_.size(); }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  uint64_t mapping_count() const { return mappings_.size() - block_count_; }
  uint64_t block_count() const { return block_count_; }

 private:
  using Mappings = std::map<uint64_t, Mapping>;
  using Chunks = std::map<uint64_t, std::shared_ptr<PhysicalMemory>>;
  bool is_reserved(Range range) const;  // the whole range
  bool is_unmapped(Range range) const;  // the whole range
  // Returns an address at which `size` bytes are free in a chunk of the device, or 0 if there is no
  // such address.
  uint64_t room_in_chunks(int device, uint64_t size) const;
  CUresult add_chunk(std::shared_ptr<PhysicalMemory> memory, uint64_t* address);
  Chunks::const_iterator find_chunk(uint64_t address) const;

  std::map<uint64_t, uint64_t> reservations_;  // address to size
  Chunks chunks_;                              // by address; a chunk without blocks is released
  Mappings mappings_;
  uint64_t reserved_bytes_ = 0;
  uint64_t block_count_ = 0;
};

}  // namespace memsaver::sim
