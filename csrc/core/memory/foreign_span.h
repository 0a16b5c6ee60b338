// foreign_span: memory of another process, mapped into this one.
//
// The other process's span is mirrored: a reservation of the same size, in which each imported
// extent lies at its offset in that span. Several tensors therefore share one mapping, and
// addresses are converted by an addition.
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

// Any thread may use an object, but only one at a time.
class ForeignSpan {
 public:
  // Reserves addresses on a device of this process; `bytes` is rounded up to the granularity.
  // Throws kInvalidArgument for 0 bytes, kDriverFailed, kOutOfDeviceMemory.
  static std::unique_ptr<ForeignSpan> reserve(Device& device, uint64_t bytes);

  // Waits for work on the devices, then unmaps and releases everything.
  ~ForeignSpan();
  ForeignSpan(const ForeignSpan&) = delete;
  ForeignSpan& operator=(const ForeignSpan&) = delete;

  uint64_t address() const { return addresses_.address(); }

  // Imports and maps extents, all or none, with read and write access for the device and its active
  // peers. Errors: kInvalidArgument if an extent is empty, lies outside the span or overlaps a
  // mapped one; kDriverFailed, kOutOfDeviceMemory.
  void map(std::vector<ForeignExtent> extents);

  // Waits for work on the devices, then unmaps and releases the extents at these offsets; without
  // offsets it only waits. Ignores other offsets. If the driver refuses (kDriverFailed), the call
  // may be repeated.
  void unmap(const std::vector<uint64_t>& offsets);

 private:
  ForeignSpan(Device& device, VaReservation&& addresses)
      : device_(device), addresses_(std::move(addresses)) {}

  Device& device_;
  VaReservation addresses_;
  std::map<uint64_t, Mapping> mapped_;  // by offset; after addresses_, so it is destroyed first
};

}  // namespace memsaver
