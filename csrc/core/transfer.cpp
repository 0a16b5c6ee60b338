#include "core/transfer.h"

#include <algorithm>

#include "core/driver.h"

namespace memsaver {

Transfer::~Transfer() {
  for (Device* device : busy_) {
    try {
      DeviceScope scope(*device);
      if (driver().cuStreamSynchronize(device->copy_stream()) != CUDA_SUCCESS) device->drain();
    } catch (...) {
      // The context is gone, and with it the copies.
    }
  }
}

uint64_t Transfer::queue(Device& device, const HostBackup& backup, const std::vector<Range>& ranges,
                         Direction direction) {
  DeviceScope scope(device);
  CUstream stream = device.copy_stream();
  if (std::find(busy_.begin(), busy_.end(), &device) == busy_.end()) busy_.push_back(&device);
  uint64_t bytes = 0;
  for (const Range& piece : backup.pieces(ranges)) {
    void* const host = backup.host(piece.address);
    if (direction == Direction::kToHost) {
      CU_CHECK(cuMemcpyDtoHAsync, host, piece.address, piece.bytes, stream);
    } else {
      CU_CHECK(cuMemcpyHtoDAsync, piece.address, host, piece.bytes, stream);
    }
    bytes += piece.bytes;
  }
  return bytes;
}

uint64_t Transfer::save(Device& device, const HostBackup& backup,
                        const std::vector<Range>& ranges) {
  return queue(device, backup, ranges, Direction::kToHost);
}

uint64_t Transfer::restore(Device& device, const HostBackup& backup,
                           const std::vector<Range>& ranges) {
  return queue(device, backup, ranges, Direction::kToDevice);
}

void Transfer::wait() {
  while (!busy_.empty()) {
    Device& device = *busy_.back();
    DeviceScope scope(device);
    CU_CHECK(cuStreamSynchronize, device.copy_stream());
    busy_.pop_back();
  }
}

}  // namespace memsaver
