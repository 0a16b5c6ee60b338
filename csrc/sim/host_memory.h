// Host memory that the simulated device can access without staging: pinned memory and registered
// memory.
//
// The caller of every function must own State::mutex (state.h). A function that returns an error
// has no effect.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "address_space.h"

namespace memsaver::sim {

class HostMemory {
 public:
  // Allocates zeroed pages, for the context of `device`.
  CUresult allocate(uint64_t size, int device, uint64_t* address);
  CUresult free(uint64_t address);
  // Registers a range. The pages that contain the range must be mapped. The range must not overlap
  // a registered range (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED; a shared page is not an overlap)
  // or be in pages that allocate() returned (CUDA_ERROR_INVALID_VALUE).
  CUresult add(Range range, int device);
  CUresult remove(uint64_t address);
  // Frees the memory of a device's context.
  void drop_all_of(int device);

  struct Entry {
    Range range;  // as requested
    Range taken;  // unavailable to others: whole pages if allocated, the range itself if registered
    int device = 0;
    bool registered = false;
  };
  // Returns the entry whose range contains the address, or null if there is none.
  const Entry* find(uint64_t address) const;
  // Returns whether one entry contains the whole range.
  bool contains(Range range) const;
  // Returns whether the range begins in an entry and ends outside it.
  bool leaves(Range range) const;

  void set_limit(uint64_t bytes) { limit_ = bytes; }
  uint64_t pinned_bytes() const { return pinned_bytes_; }
  uint64_t registered_bytes() const { return registered_bytes_; }

 private:
  using Entries = std::map<uint64_t, Entry>;
  bool fits(uint64_t bytes) const;
  void erase(Entries::iterator at);

  Entries entries_;  // by range.address
  uint64_t limit_ = UINT64_MAX;
  uint64_t pinned_bytes_ = 0;
  uint64_t registered_bytes_ = 0;
};

}  // namespace memsaver::sim
