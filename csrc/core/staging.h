// staging: bytes that devices cannot reach directly go through pinned buffers, several at once.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/device.h"
#include "core/handles.h"
#include "core/host_budget.h"

namespace memsaver {

// The most bytes of one buffer: large enough for the bus and a disk, small enough that a few are in
// flight in a transfer of 100 MiB.
constexpr uint64_t kStagingBytes = 16ull << 20;

// Host memory that a device reaches, and a stream of its own.
class StagingBuffer {
 public:
  // Inside a DeviceScope; of as many bytes as are claimed. Throws kOutOfHostMemory, kDriverFailed.
  StagingBuffer(Device& device, HostClaim claim);
  // Waits for what is queued on the stream. Pages that cannot be unpinned stay claimed, for the
  // next buffer of any device, until trim_staging().
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  char* data() const { return data_; }
  uint64_t bytes() const;
  CUstream stream() const { return stream_.get(); }
  // Waits for what is queued on the stream, whatever the driver says of it.
  void settle() noexcept;

  class Pages;  // staging.cpp's

 private:
  Device& device_;
  std::unique_ptr<Pages> pages_;
  char* data_;  // theirs
  Stream stream_;
};

// Runs job(i, buffer) for i in [0, count) on threads, with buffers of `bytes`, whole pages; each
// inside a DeviceScope of the device and with a buffer that no other job uses meanwhile; returns
// when all are done. Throws what the first failing job threw (later ones are not started), and
// kOutOfHostMemory where there is no room for one buffer; where there is not for all of them, fewer
// do the work. A `reserve` of so many bytes or more is one of them, so that there is always room;
// it is the caller's again, with nothing under way in it, whatever happens.
void stage(Device& device, size_t count, uint64_t bytes,
           const std::function<void(size_t, StagingBuffer&)>& job,
           StagingBuffer* reserve = nullptr);

// Gives back pages of buffers that could not be unpinned before; the bytes. Any thread.
uint64_t trim_staging() noexcept;

}  // namespace memsaver
