// transfer: copies of bytes for the simulated device.
//
// Accesses device memory through the device's file, never through its mapping, and host memory
// through system calls, so that nothing here faults if a caller unmaps memory during a copy. No
// function opens a descriptor, and the process's limit on file sizes does not apply.
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

// Returns the memory that an address range currently refers to, for `device` to read or write.
// Returns false if a device address in it is unmapped or inaccessible. Needs the lock of state.h.
bool resolve(const Range& range, int device, bool write, std::vector<Span>* spans);

// Copies, without the lock; both sides have equal sizes. Returns false if host memory was not
// readable or writable, or the operating system was out of memory; bytes before that point are
// copied.
bool copy(const std::vector<Span>& destination, const std::vector<Span>& source);
// Fills the spans with the lowest `width` bytes (1 or 4) of `value`; sizes are multiples of
// `width`. Filling with zeros returns the memory to the operating system. Returns false like
// copy().
bool fill(const std::vector<Span>& destination, uint32_t value, unsigned width);

// Copy spans to or from one of the simulator's own buffers, with or without the lock. Return false
// like copy().
bool fetch(const std::vector<Span>& source, void* buffer);
bool store(const void* buffer, const std::vector<Span>& destination);

}  // namespace memsaver::sim
