// Host memory that the simulated device can reach without staging: pinned and registered.
//
// Needs the caller's lock for every call. No call has an effect when it returns an error.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "address_space.h"

namespace memsaver::sim {

class HostMemory {
 public:
  // Zeroed pages, charged to `device`'s context.
  CUresult allocate(uint64_t size, int device, uint64_t* address);
  CUresult free(uint64_t address);
  // The pages around the range must be mapped. It must not overlap what is registered
  // (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED; a shared page is no overlap) nor lie in pages
  // allocated here (CUDA_ERROR_INVALID_VALUE).
  CUresult add(Range range, int device);
  CUresult remove(uint64_t address);
  // What belongs to a context goes with it.
  void drop_all_of(int device);

  struct Entry {
    Range range;  // as asked for
    Range taken;  // from others: its pages when allocated, the range itself when registered
    int device = 0;
    bool registered = false;
  };
  // The entry whose range holds the address; null when there is none.
  const Entry* find(uint64_t address) const;
  // True when one entry holds the whole range.
  bool contains(Range range) const;
  // True when the range begins in an entry and ends outside of it.
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
