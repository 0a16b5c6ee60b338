#include "device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

namespace memsaver::sim {
namespace {

constexpr off_t kFileBytes = off_t{1} << 62;

}  // namespace

PhysicalMemory::PhysicalMemory(DeviceMemory* device, uint64_t offset, uint64_t size, uint64_t id,
                               const CUmemAllocationProp& properties)
    : device_(device), offset_(offset), size_(size), id_(id), properties_(properties) {}

PhysicalMemory::~PhysicalMemory() { device_->release(offset_, size_); }

int PhysicalMemory::fd() const { return device_->fd(); }

int PhysicalMemory::ordinal() const { return device_->ordinal(); }

DeviceMemory::DeviceMemory(int ordinal, uint64_t capacity_bytes)
    : ordinal_(ordinal), capacity_(capacity_bytes) {}

DeviceMemory::~DeviceMemory() {
  if (fd_ >= 0) close(fd_);
}

bool DeviceMemory::open() {
  fd_ = memfd_create("memsaver-sim-device", MFD_CLOEXEC);
  if (fd_ < 0) return false;
  // A file size beyond the process's limit (RLIMIT_FSIZE) would raise a signal that ends the
  // process.
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(kFileBytes)) {
    errno = EFBIG;
    return false;
  }
  return ftruncate(fd_, kFileBytes) == 0;
}

std::shared_ptr<PhysicalMemory> DeviceMemory::create(uint64_t size, uint64_t id,
                                                     const CUmemAllocationProp& properties) {
  if (size > free_bytes()) return nullptr;
  auto memory = std::make_shared<PhysicalMemory>(this, next_offset_, size, id, properties);
  next_offset_ += size;
  used_ += size;
  return memory;
}

uint64_t DeviceMemory::free_bytes() const {
  const uint64_t taken = used_.load() + occupied_;
  return taken < occupied_ || taken > capacity_ ? 0 : capacity_ - taken;
}

void DeviceMemory::release(uint64_t offset, uint64_t size) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(size));
  used_ -= size;
}

}  // namespace memsaver::sim
