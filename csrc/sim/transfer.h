// transfer: copies of bytes for the simulated device.
//
// Accesses device memory through the device's file, never through its mapping, and host memory
// through system calls, so that nothing here faults if a caller unmaps memory during a copy. No
// function opens a descriptor, and the process's limit of file sizes does not apply.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "address_space.h"

namespace memsaver::sim {

// Neighbouring bytes in a device's file, or in the host's memory.
struct Span {
  std::shared_ptr<PhysicalMemory> memory;  // null: host
  uint64_t position = 0;                   // in the file, or an address
  uint64_t size = 0;
};

// Finds what stands behind an address range at this moment, for `device` to read or write. False
// when a device address in it is unmapped or without access. Needs the lock of state.h.
bool resolve(const Range& range, int device, bool write, std::vector<Span>* spans);

// Both without the lock. False when host memory was not readable or writable, or the operating
// system had no memory left; bytes before that point are moved. Sizes of both sides are equal.
bool copy(const std::vector<Span>& destination, const std::vector<Span>& source);
// Fills with the lowest `width` bytes of value (1 or 4; sizes are multiples of it). Setting zero
// gives the memory back to the operating system.
bool fill(const std::vector<Span>& destination, uint32_t value, unsigned width);

// The bytes of spans, to or from a buffer of the simulator's own. Without the lock or with it.
// False as above.
bool fetch(const std::vector<Span>& source, void* buffer);
bool store(const void* buffer, const std::vector<Span>& destination);

}  // namespace memsaver::sim
