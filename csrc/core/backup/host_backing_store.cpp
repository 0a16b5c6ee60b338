#include "core/backup/host_backing_store.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/platform/numa.h"
#include "core/platform/status.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

constexpr uint64_t kHugePageBytes = 2ull << 20;

[[noreturn]] void no_host_memory(const std::string& what, uint64_t bytes, int reason) {
  Error error(Status::kOutOfHostMemory,
              what + " of " + format_bytes(bytes) +
                  " of host memory for a backup failed: " + std::strerror(reason) +
                  "; free host memory, raise the limit, or use backup='disk' or 'none'");
  error.needed_bytes = bytes;
  throw error;
}

// Populates the range's pages by writing to each page. Page faults on several threads do not wait
// for each other or for a thread that pins memory, but MADV_POPULATE_WRITE does (12 threads and a
// pinning thread, on an H200's host: 44 GB/s with writes, 29 with MADV_POPULATE_WRITE).
void touch(char* start, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t at = 0; at < bytes; at += page) static_cast<volatile char*>(start)[at] = 0;
}

// Releases the pages' memory, and unlocks pages that the process has locked.
void release_pages(char* start, uint64_t bytes) {
  if (madvise(start, bytes, MADV_DONTNEED) == 0) return;
  if (munlock(start, bytes) == 0 && madvise(start, bytes, MADV_DONTNEED) == 0) return;
  no_host_memory("releasing", bytes, errno);
}

}  // namespace

HostBackingStore::Mirror::Mirror(uint64_t device_address, uint64_t bytes, int node)
    : device_address_(device_address), bytes_(bytes) {
  void* const whole = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) no_host_memory("reserving addresses", bytes, errno);
  const uint64_t start = reinterpret_cast<uint64_t>(whole);
  const uint64_t before = (kHugePageBytes - start % kHugePageBytes) % kHugePageBytes;
  base_ = static_cast<char*>(whole) + before;
  if (before > 0) munmap(whole, before);
  munmap(base_ + bytes, kHugePageBytes - before);
  // In a process that locks its future memory (mlockall), all pages would be populated at once and
  // could not be released.
  munlock(base_, bytes);
  if (mprotect(base_, bytes, PROT_READ | PROT_WRITE) != 0) {
    const int reason = errno;
    munmap(base_, bytes);
    no_host_memory("reserving addresses", bytes, reason);
  }
  madvise(base_, bytes, MADV_HUGEPAGE);  // one ninth of the faults, if the system allows huge pages
  // A child does not use the memory, and copying its page tables would slow down the fork.
  madvise(base_, bytes, MADV_DONTFORK);
  prefer_node(base_, bytes, node);
  begin_ = base_;
}

void HostBackingStore::Mirror::leave(char* start, uint64_t bytes) noexcept {
  if (start > begin_) munmap(begin_, static_cast<uint64_t>(start - begin_));
  begin_ = start + bytes;
}

HostBackingStore::~HostBackingStore() {
  for (auto& [address, pinned] : pinned_) {
    try {
      if (pinned.bytes() > 0) pinned.unpin();
    } catch (...) {
      pinned.adopt(claim_.split(pinned.bytes()));
      for (auto& mirror : mirrors_) {
        if (mirror->contains(address)) mirror->leave(pinned.data(), pinned.bytes());
      }
    }
  }
}

void HostBackingStore::cover(const std::vector<VaReservation>& spans) {
  for (const VaReservation& span : spans) {
    bool covered = false;
    for (const auto& mirror : mirrors_) covered |= mirror->device_address() == span.address();
    if (!covered)
      mirrors_.push_back(
          std::make_unique<Mirror>(span.address(), span.bytes(), device_.numa_node()));
  }
}

char* HostBackingStore::place(uint64_t address) const {
  for (const auto& mirror : mirrors_) {
    if (mirror->contains(address)) return mirror->at(address);
  }
  throw Error(Status::kInternal,
              "no place in host memory for the backup of address " + std::to_string(address));
}

void HostBackingStore::claim(const std::vector<Range>& chunks) {
  claim_.grow(total(chunks), HostUse::kBackup);
}

void HostBackingStore::populate(const Range& part) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    populated_[part.address] = part.bytes;
  }
  touch(place(part.address), part.bytes);
  claim_.touched(part.bytes);
}

void HostBackingStore::attach(const Range& chunk) {
  if (kind_ == Kind::kPinned) {
    PinnedMemory& pinned = pinned_[chunk.address];
    pinned = PinnedMemory(device_);
    pinned.pin(place(chunk.address), chunk.bytes);
  }
}

void HostBackingStore::drop(const Range& chunk) {
  const auto pinned = pinned_.find(chunk.address);
  if (pinned != pinned_.end()) {
    if (pinned->second.bytes() > 0) pinned->second.unpin();
    pinned_.erase(pinned);
  }
  release_pages(place(chunk.address), chunk.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t touched = 0;
  for (auto part = populated_.lower_bound(chunk.address);
       part != populated_.end() && part->first < chunk.end(); part = populated_.erase(part)) {
    touched += part->second;
  }
  claim_.shrink(touched);  // including parts that an earlier drop could not release
  claim_.shrink_untouched(chunk.bytes - std::min(chunk.bytes, touched));
}

void* HostBackingStore::direct(uint64_t address) const {
  return kind_ == Kind::kPinned ? place(address) : nullptr;
}

void HostBackingStore::write(uint64_t address, const void* source, uint64_t bytes) {
  std::memcpy(place(address), source, bytes);
}

void HostBackingStore::read(uint64_t address, void* target, uint64_t bytes) {
  std::memcpy(target, place(address), bytes);
}

}  // namespace memsaver
