#include "device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace memsaver::sim {
namespace {

uint64_t g_granularity = kGranularity;

constexpr off_t kFileBytes = off_t{1} << 62;

// The end of an exportable memory's file.
struct Label {
  char magic[16];
  int64_t ordinal;
  uint64_t size;
};
constexpr char kMagic[16] = "memsaver-sim-1";
constexpr uint64_t kLabelBytes = 4096;

bool fits_in_a_file(uint64_t bytes) {
  rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= bytes;
}

// Returns the file of exportable memory, or -1.
int create_file(int ordinal, uint64_t size) {
  if (!fits_in_a_file(size + kLabelBytes)) return -1;
  const int file = memfd_create("memsaver-sim-memory", MFD_CLOEXEC);
  if (file < 0) return -1;
  Label label{{}, ordinal, size};
  std::memcpy(label.magic, kMagic, sizeof(kMagic));
  if (ftruncate(file, static_cast<off_t>(size + kLabelBytes)) == 0 &&
      pwrite(file, &label, sizeof(label), static_cast<off_t>(size)) == sizeof(label)) {
    return file;
  }
  close(file);
  return -1;
}

bool read_label(int file, Label* label) {
  struct stat facts;
  if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  const off_t at = facts.st_size - static_cast<off_t>(kLabelBytes);
  return at > 0 && pread(file, label, sizeof(*label), at) == sizeof(*label) &&
         std::memcmp(label->magic, kMagic, sizeof(kMagic)) == 0 &&
         label->size == static_cast<uint64_t>(at) && label->size % granularity() == 0;
}

}  // namespace

uint64_t granularity() { return g_granularity; }

bool set_granularity(uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes < page || bytes > kGranularity || (bytes & (bytes - 1)) != 0) return false;
  g_granularity = bytes;
  return true;
}

PhysicalMemory::PhysicalMemory(DeviceMemory* device, uint64_t offset, uint64_t size, uint64_t id,
                               const CUmemAllocationProp& properties, int own_file, bool counted)
    : device_(device),
      offset_(offset),
      size_(size),
      id_(id),
      properties_(properties),
      own_file_(own_file),
      counted_(counted) {}

PhysicalMemory::~PhysicalMemory() {
  if (own_file_ >= 0) close(own_file_);
  if (counted_) device_->release(*this);
}

int PhysicalMemory::fd() const { return own_file_ >= 0 ? own_file_ : device_->fd(); }

int PhysicalMemory::ordinal() const { return device_->ordinal(); }

DeviceMemory::DeviceMemory(int ordinal, uint64_t capacity_bytes)
    : ordinal_(ordinal), capacity_(capacity_bytes) {}

DeviceMemory::~DeviceMemory() {
  if (fd_ >= 0) close(fd_);
}

bool DeviceMemory::open() {
  fd_ = memfd_create("memsaver-sim-device", MFD_CLOEXEC);
  if (fd_ < 0) return false;
  // A file size beyond the process's limit (RLIMIT_FSIZE) would raise a signal that kills the
  // process.
  if (!fits_in_a_file(static_cast<uint64_t>(kFileBytes))) {
    errno = EFBIG;
    return false;
  }
  return ftruncate(fd_, kFileBytes) == 0;
}

std::shared_ptr<PhysicalMemory> DeviceMemory::create(uint64_t size, uint64_t id,
                                                     const CUmemAllocationProp& properties) {
  if (size > free_bytes()) return nullptr;
  if ((properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
    const int file = create_file(ordinal_, size);
    if (file < 0) return nullptr;
    used_ += size;
    return std::make_shared<PhysicalMemory>(this, 0, size, id, properties, file);
  }
  auto memory = std::make_shared<PhysicalMemory>(this, next_offset_, size, id, properties);
  next_offset_ += size;
  used_ += size;
  return memory;
}

uint64_t DeviceMemory::free_bytes() const {
  const uint64_t taken = used_.load() + occupied_;
  return taken < occupied_ || taken > capacity_ ? 0 : capacity_ - taken;
}

std::shared_ptr<PhysicalMemory> DeviceMemory::import_file(int descriptor, uint64_t id) {
  Label label;
  if (!read_label(descriptor, &label) || label.ordinal != ordinal_) return nullptr;
  const int file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (file < 0) return nullptr;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal_};
  return std::make_shared<PhysicalMemory>(this, 0, label.size, id, properties, file, false);
}

int DeviceMemory::ordinal_of(int descriptor) {
  Label label;
  return read_label(descriptor, &label) ? static_cast<int>(label.ordinal) : -1;
}

void DeviceMemory::release(const PhysicalMemory& memory) {
  if (!memory.exportable()) {
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(memory.offset()),
              static_cast<off_t>(memory.size()));
  }
  used_ -= memory.size();
}

}  // namespace memsaver::sim
