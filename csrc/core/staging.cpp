#include "core/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "core/driver.h"
#include "core/log.h"
#include "core/status.h"
#include "core/text.h"
#include "core/workers.h"

namespace memsaver {

// Claimed and pinned. In a DeviceScope, like unpinning.
class StagingBuffer::Pages {
 public:
  // As many bytes as are claimed.
  Pages(Device& device, HostClaim claim)
      : device_(device), claim_(std::move(claim)), bytes_(claim_.bytes()) {
    void* const pages = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (pages == MAP_FAILED) {
      Error error(Status::kOutOfHostMemory, "taking " + format_bytes(bytes_) +
                                                " of host memory for a staging buffer failed: " +
                                                std::strerror(errno) + "; free host memory");
      error.needed_bytes = bytes_;
      throw error;
    }
    data_ = static_cast<char*>(pages);
    madvise(pages, bytes_, MADV_DONTFORK);  // files are read into it directly
    try {
      pinned_ = PinnedRange::pin(data_, bytes_);
    } catch (...) {
      munmap(data_, bytes_);
      throw;
    }
    claim_.touched(bytes_);
  }
  // Pages that are still pinned must not become somebody else's.
  ~Pages() {
    if (pinned_.bytes() == 0) munmap(data_, bytes_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  Device& device() const { return device_; }
  void unpin() { pinned_.unpin(); }

 private:
  Device& device_;  // that pinned them; every device reaches them
  HostClaim claim_;
  const uint64_t bytes_;
  char* data_ = nullptr;
  PinnedRange pinned_;
};

namespace {

// Requests in flight: 8 keep a disk busy that does 3 GB/s, and copy ordinary memory at the rate of
// the bus; together they stay below the 256 MiB that a backup may cost beyond its bytes.
constexpr unsigned kBuffers = 8;

// Pages that could not be unpinned.
struct Strays {
  std::mutex mutex;
  std::vector<std::unique_ptr<StagingBuffer::Pages>> pages;

  // Some of so many bytes or more, or null.
  std::unique_ptr<StagingBuffer::Pages> take(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto at = pages.begin(); at != pages.end(); ++at) {
      if ((*at)->bytes() < bytes) continue;
      std::unique_ptr<StagingBuffer::Pages> found = std::move(*at);
      pages.erase(at);
      return found;
    }
    return nullptr;
  }
};

Strays& strays() {
  static Strays* const instance = new Strays;
  return *instance;
}

// Unpins pages in a DeviceScope, or keeps them: whether they are gone.
bool give_back(std::unique_ptr<StagingBuffer::Pages> pages) noexcept {
  try {
    try {
      pages->unpin();
      return true;
    } catch (const Error& error) {
      if (!is_shutdown(static_cast<CUresult>(error.cuda_error))) {
        warn(error.message + "; " + format_bytes(pages->bytes()) +
             " of host memory stay held for now: trim() tries again");
      }
    }
    std::lock_guard<std::mutex> lock(strays().mutex);
    strays().pages.push_back(std::move(pages));
  } catch (...) {
    static_cast<void>(pages.release());  // no memory to keep them by: they stay pinned and claimed
  }
  return false;
}

// The buffers of one call: as many as are used at once.
class Buffers {
 public:
  Buffers(Device& device, std::vector<HostClaim> claims, StagingBuffer* reserve)
      : device_(device), claims_(std::move(claims)), reserve_(reserve) {
    if (reserve_) idle_.push_back(reserve_);
  }
  ~Buffers() {
    if (reserve_) reserve_->settle();
    try {
      DeviceScope scope(device_);
      made_.clear();
    } catch (...) {
      made_.clear();  // each of them warns of what it cannot give back
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
  void give(StagingBuffer& buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(&buffer);
  }

 private:
  Device& device_;
  std::mutex mutex_;
  std::vector<HostClaim> claims_;  // of buffers that are not there yet
  StagingBuffer* const reserve_;   // or null
  std::vector<std::unique_ptr<StagingBuffer>> made_;
  std::vector<StagingBuffer*> idle_;
};

// Claims for at most so many buffers of `bytes`, for `least` at least.
std::vector<HostClaim> claim_buffers(size_t most, size_t least, uint64_t bytes) {
  std::vector<HostClaim> claims;
  while (claims.size() < most) {
    try {
      claims.push_back(HostClaim::take(bytes, "a staging buffer"));
    } catch (const Error& error) {
      if (claims.size() < least || error.status != Status::kOutOfHostMemory) throw;
      break;
    }
  }
  return claims;
}

}  // namespace

StagingBuffer::StagingBuffer(Device& device, HostClaim claim)
    : device_(device), pages_(strays().take(claim.bytes())) {
  if (!pages_) pages_ = std::make_unique<Pages>(device, std::move(claim));
  data_ = pages_->data();
  try {
    stream_ = Stream::create(device);
  } catch (...) {
    give_back(std::move(pages_));
    throw;
  }
}

StagingBuffer::~StagingBuffer() {
  settle();
  give_back(std::move(pages_));
}

uint64_t StagingBuffer::bytes() const { return pages_->bytes(); }

void StagingBuffer::settle() noexcept {
  try {
    if (driver().cuStreamSynchronize(stream_.get()) != CUDA_SUCCESS) device_.drain();
  } catch (...) {
    // A context that is gone has no copies left.
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
  std::atomic<bool> failed{false};  // a job that throws keeps its buffer from the others
  const auto run = [&](size_t index) {
    if (failed) return;
    try {
      DeviceScope scope(device);
      StagingBuffer& buffer = buffers.take();
      job(index, buffer);
      buffers.give(buffer);
    } catch (...) {
      failed = true;
      throw;
    }
  };
  Workers workers(count, run, threads);
  for (size_t i = 0; i < count; ++i) workers.wait_for(i);
}

uint64_t trim_staging() noexcept {
  uint64_t released = 0;
  try {
    while (std::unique_ptr<StagingBuffer::Pages> pages = strays().take(0)) {
      Device& device = pages->device();
      const uint64_t bytes = pages->bytes();
      std::optional<DeviceScope> scope;
      try {
        scope.emplace(device);
      } catch (...) {
        // Without a context they cannot be unpinned, and are kept.
      }
      if (!give_back(std::move(pages))) break;
      released += bytes;
    }
  } catch (...) {
  }
  return released;
}

}  // namespace memsaver
