#include "core/transfer.h"

#include <algorithm>

#include "core/driver.h"

namespace memsaver {

Transfer::~Transfer() {
  for (Busy& busy : busy_) {
    try {
      CUstream stream = busy.device->copy_stream();
      if (driver().cuStreamSynchronize(stream) != CUDA_SUCCESS) busy.device->drain();
    } catch (...) {
      // The context is gone, and with it the copies.
    }
  }
  let_go();
}

void Transfer::let_go() noexcept {
  while (!busy_.empty()) busy_.pop_back();
}

uint64_t Transfer::queue(Device& device, const HostBackup& backup, const std::vector<Range>& ranges,
                         Direction direction) {
  if (ranges.empty()) return 0;
  CUstream stream = device.copy_stream();
  const bool known = std::any_of(busy_.begin(), busy_.end(),
                                 [&](const Busy& busy) { return busy.device == &device; });
  if (!known) busy_.push_back({&device, std::make_unique<DeviceScope>(device)});
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
  for (const Busy& busy : busy_) CU_CHECK(cuStreamSynchronize, busy.device->copy_stream());
  let_go();
}

}  // namespace memsaver
