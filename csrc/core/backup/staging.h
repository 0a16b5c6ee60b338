// staging: concurrent copies through pinned buffers, for memory that devices cannot access.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/driver/device.h"
#include "core/driver/handles.h"
#include "core/driver/pinned_memory.h"
#include "core/platform/host_budget.h"

namespace memsaver {

// The maximum size of a buffer, in bytes. This size is large enough to use the bus and a disk
// efficiently, and small enough that a transfer of 100 MiB has several buffers in flight.
constexpr uint64_t kStagingBytes = 16ull << 20;

// Pinned host memory with its own stream.
class StagingBuffer {
 public:
  // Allocates the claimed number of bytes. Call inside a DeviceScope. Throws kOutOfHostMemory,
  // kDriverFailed.
  StagingBuffer(Device& device, HostClaim claim);
  ~StagingBuffer() { wait(); }
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  char* data() const { return memory_.data(); }
  uint64_t bytes() const { return memory_.bytes(); }
  CUstream stream() const { return stream_.get(); }
  // Waits for the work that is queued on the stream, even if that work has failed.
  void wait() noexcept;

 private:
  Device& device_;
  PinnedMemory memory_;
  Stream stream_;
};

// Runs job(i, buffer) for each i in [0, count) on several threads, inside a DeviceScope of the
// device. Each job has a buffer of `bytes` bytes (whole pages) that no other job uses at the same
// time. Returns when all jobs are done. If there is not enough host memory for all buffers, fewer
// threads are used. Throws the exception of the first job that fails; later jobs are not started.
// Throws kOutOfHostMemory if there is no memory even for one buffer. If `reserve` has at least
// `bytes` bytes, it is used as one of the buffers, so that at least one buffer exists. When the
// function returns or throws, no work is queued on `reserve`.
void stage(Device& device, size_t count, uint64_t bytes,
           const std::function<void(size_t, StagingBuffer&)>& job,
           StagingBuffer* reserve = nullptr);

}  // namespace memsaver
