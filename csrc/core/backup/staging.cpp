#include "core/backup/staging.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "core/driver/driver.h"
#include "core/platform/status.h"
#include "core/platform/workers.h"

namespace memsaver {

namespace {

// The number of requests in flight. 8 requests keep a 3 GB/s disk busy and copy ordinary memory at
// the bus's rate. Their total size stays below the 256 MiB that a backup may use in addition to its
// bytes.
constexpr unsigned kBuffers = 8;

// The buffers of one call, created on demand.
class Buffers {
 public:
  Buffers(Device& device, std::vector<HostClaim> claims, StagingBuffer* reserve)
      : device_(device), claims_(std::move(claims)), reserve_(reserve) {
    if (reserve_) idle_.push_back(reserve_);
  }
  ~Buffers() {
    if (reserve_) reserve_->wait();
    try {
      DeviceScope scope(device_);
      made_.clear();
    } catch (...) {
      // Without a context, the members' destructors release as much as possible.
    }
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  StagingBuffer& take() {
    HostClaim claim;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        StagingBuffer* const buffer = idle_.back();
        idle_.pop_back();
        return *buffer;
      }
      claim = std::move(claims_.back());
      claims_.pop_back();
    }
    auto made = std::make_unique<StagingBuffer>(device_, std::move(claim));
    std::lock_guard<std::mutex> lock(mutex_);
    made_.push_back(std::move(made));
    return *made_.back();
  }
  void put_back(StagingBuffer& buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(&buffer);
  }

 private:
  Device& device_;
  std::mutex mutex_;
  std::vector<HostClaim> claims_;  // the memory of buffers that do not exist yet
  StagingBuffer* const reserve_;   // or null
  std::vector<std::unique_ptr<StagingBuffer>> made_;
  std::vector<StagingBuffer*> idle_;
};

// Claims host memory for at most `most` and at least `least` buffers of `bytes`.
std::vector<HostClaim> claim_buffers(size_t most, size_t least, uint64_t bytes) {
  std::vector<HostClaim> claims;
  while (claims.size() < most) {
    try {
      claims.push_back(HostClaim::take(bytes, HostUse::kStaging));
    } catch (const Error& error) {
      if (claims.size() < least || error.status != Status::kOutOfHostMemory) throw;
      break;
    }
  }
  return claims;
}

}  // namespace

StagingBuffer::StagingBuffer(Device& device, HostClaim claim)
    : device_(device),
      memory_(PinnedMemory::allocate(device, std::move(claim), "a staging buffer")),
      stream_(Stream::create(device)) {}

void StagingBuffer::wait() noexcept {
  try {
    if (driver().cuStreamSynchronize(stream_.get()) != CUDA_SUCCESS) device_.drain();
  } catch (...) {
    // If the context is gone, no copies are in flight.
  }
}

void stage(Device& device, size_t count, uint64_t bytes,
           const std::function<void(size_t, StagingBuffer&)>& job, StagingBuffer* reserve) {
  if (count == 0) return;
  if (reserve && reserve->bytes() < bytes) reserve = nullptr;
  const size_t there = reserve ? 1 : 0;
  const size_t most = std::min<size_t>({count, kBuffers, std::max(worker_count(), 2u)});
  std::vector<HostClaim> claims = claim_buffers(most - there, 1 - there, bytes);
  const unsigned threads = static_cast<unsigned>(claims.size() + there);
  Buffers buffers(device, std::move(claims), reserve);
  std::atomic<bool> failed{false};  // after a job that throws, no further job may use a buffer
  const auto run = [&](size_t index) {
    if (failed) return;
    try {
      DeviceScope scope(device);
      StagingBuffer& buffer = buffers.take();
      job(index, buffer);
      buffers.put_back(buffer);
    } catch (...) {
      failed = true;
      throw;
    }
  };
  Workers workers(count, run, threads);
  for (size_t i = 0; i < count; ++i) workers.wait_for(i);
}

}  // namespace memsaver
