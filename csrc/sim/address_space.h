// Virtual addresses: reservations, mappings of physical memory into them, and access rights.
//
// A reservation is PROT_NONE address space; a mapping is a shared mapping of the device's file
// over part of one, PROT_NONE until access is set. So two mappings of one memory alias, and a
// touch from the host of what is unmapped or without access faults. cuMemAlloc's blocks are
// mappings without a reservation, accessible from the start; they lie in chunks, which those below
// kGranularity share.
//
// Needs the caller's lock for every call. No call has an effect when it returns an error.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "device_memory.h"

namespace memsaver::sim {

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
  uint64_t offset = 0;           // of the range within the memory; 0 unless a block
  uint64_t id = 0;               // the memory's, or the block's own; never used twice in a process
  bool from_alloc = false;       // cuMemAlloc: every device may use it
  std::vector<unsigned> access;  // CUmemAccess_flags by device ordinal

  bool allows(int device, bool write) const;
};

// Part of a mapping, in terms of the memory behind it. Keeps that memory alive.
struct Piece {
  std::shared_ptr<PhysicalMemory> memory;
  uint64_t offset = 0;  // within the memory
  uint64_t size = 0;
};

class AddressSpace {
 public:
  // Multiples of kGranularity. `alignment` 0 means kGranularity. `hint` is taken when it is free
  // and aligned.
  CUresult reserve(uint64_t size, uint64_t alignment, uint64_t hint, uint64_t* address);
  // Exactly one whole reservation, without mappings.
  CUresult free(Range range);

  // Reserved throughout (in one reservation or several neighbours), whole memory, no overlap.
  CUresult map(Range range, std::shared_ptr<PhysicalMemory> memory);
  // Reserved throughout; takes the mappings in it, none of which may reach out of it. There need
  // not be any.
  CUresult unmap(Range range);
  // Begins with a mapping, and cuts none. Goes no further than the first hole, which is no error.
  // `descriptions` replace the rights of the devices they name.
  CUresult set_access(Range range, const CUmemAccessDesc* descriptions, size_t count,
                      int device_count);

  // A block for cuMemAlloc, of `size` bytes rounded up. `id` becomes the block's.
  CUresult allocate(DeviceMemory* device, uint64_t size, uint64_t id, uint64_t* address);
  CUresult free_block(uint64_t address);
  void free_blocks_of(int device);

  // The mapping or block that holds `address`; null when there is none.
  const Mapping* find(uint64_t address) const;
  // The memory behind the range, in order. False when a byte of it is unmapped or `device` may
  // not access it that way.
  bool pieces(Range range, int device, bool write, std::vector<Piece>* out) const;
  // The reservation that holds `address`; empty when there is none.
  Range reservation(uint64_t address) const;
  // True when the address is reserved or in a chunk: the device's, whether mapped or not.
  bool owns(uint64_t address) const;

  uint64_t reservation_count() const { return reservations_.size(); }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  uint64_t mapping_count() const { return mappings_.size() - block_count_; }
  uint64_t block_count() const { return block_count_; }

 private:
  using Mappings = std::map<uint64_t, Mapping>;
  using Chunks = std::map<uint64_t, std::shared_ptr<PhysicalMemory>>;
  bool is_reserved(Range range) const;  // throughout
  bool is_unmapped(Range range) const;  // throughout
  // Where `size` bytes are free in a chunk of the device; 0 when there is none.
  uint64_t room_in_chunks(int device, uint64_t size) const;
  CUresult add_chunk(std::shared_ptr<PhysicalMemory> memory, uint64_t* address);
  Chunks::const_iterator find_chunk(uint64_t address) const;

  std::map<uint64_t, uint64_t> reservations_;  // address to size
  Chunks chunks_;                              // by address; one without blocks is given back
  Mappings mappings_;
  uint64_t reserved_bytes_ = 0;
  uint64_t block_count_ = 0;
};

}  // namespace memsaver::sim
