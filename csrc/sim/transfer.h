// transfer: copies of bytes for the simulated device.
//
// These functions access device memory through the device's file, never through a mapping, and
// access host memory through system calls. Therefore, no function faults if a caller unmaps memory
// during a copy. No function opens a descriptor, and the process's limit on file sizes does not
// apply.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "address_space.h"

namespace memsaver::sim {

// Adjacent bytes in a device's file, or in host memory.
struct Span {
  std::shared_ptr<PhysicalMemory> memory;  // null: host
  uint64_t position = 0;                   // in the file, or an address
  uint64_t size = 0;
};

// Finds the memory to which an address range currently refers, for `device` to read or write.
// Returns false if a device address in the range is unmapped or inaccessible. The caller must own
// State::mutex (state.h).
bool resolve(const Range& range, int device, bool write, std::vector<Span>* spans);

// Copies from `source` to `destination`, which must have equal sizes, without the lock. Returns
// false if host memory was not readable or writable, or if the operating system was out of memory;
// in that case, the bytes before that point have been copied.
bool copy(const std::vector<Span>& destination, const std::vector<Span>& source);
// Fills the spans with the lowest `width` bytes (1 or 4) of `value`; sizes must be multiples of
// `width`. Filling with zeros returns the memory to the operating system. Returns false in the same
// cases as copy().
bool fill(const std::vector<Span>& destination, uint32_t value, unsigned width);

// These functions copy spans to or from one of the simulator's own buffers, with or without the
// lock. They return false in the same cases as copy().
bool fetch(const std::vector<Span>& source, void* buffer);
bool store(const void* buffer, const std::vector<Span>& destination);

}  // namespace memsaver::sim
