// foreign_span: another process's memory, mapped into this process.
//
// A ForeignSpan mirrors a span of the other process: it is a reservation of the same size, in which
// each imported extent has the same offset as in that span. Several tensors therefore share one
// mapping, and an address is converted by a single addition.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/driver/handles.h"

namespace memsaver {

// An exported extent: its offset in the span, its size, and its descriptor, which the caller owns.
struct ForeignExtent {
  uint64_t offset, bytes;
  int descriptor;
};

// An object may be used on any thread, but by only one thread at a time.
class ForeignSpan {
 public:
  // Reserves addresses on a device of this process; `bytes` is rounded up to the granularity.
  // Throws kInvalidArgument for 0 bytes; also throws kDriverFailed and kOutOfDeviceMemory.
  static std::unique_ptr<ForeignSpan> reserve(Device& device, uint64_t bytes);

  // Waits for work on the devices, then unmaps and releases all extents and the addresses.
  ~ForeignSpan();
  ForeignSpan(const ForeignSpan&) = delete;
  ForeignSpan& operator=(const ForeignSpan&) = delete;

  uint64_t address() const { return addresses_.address(); }

  // Imports and maps either all of the extents or none of them, with read and write access for the
  // device and its active peers. Errors: kInvalidArgument if an extent is empty, is outside the
  // span or overlaps a mapped extent; kDriverFailed, kOutOfDeviceMemory.
  void map(std::vector<ForeignExtent> extents);

  // Waits for work on the devices, then unmaps and releases the extents at `offsets`. If
  // `offsets` is empty, this function only waits. Ignores offsets at which no extent is mapped. If
  // the driver refuses a call (kDriverFailed), the function may be called again.
  void unmap(const std::vector<uint64_t>& offsets);

 private:
  ForeignSpan(Device& device, VaReservation&& addresses)
      : device_(device), addresses_(std::move(addresses)) {}

  Device& device_;
  VaReservation addresses_;
  std::map<uint64_t, Mapping> mapped_;  // by offset; after addresses_, so it is destroyed first
};

}  // namespace memsaver
