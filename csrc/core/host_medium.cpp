#include "core/host_medium.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/driver.h"
#include "core/numa.h"
#include "core/status.h"
#include "core/text.h"

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

// Gives every page of the range memory. By a write to each: such faults of several threads do not
// wait for each other nor for a thread that pins, while MADV_POPULATE_WRITE does (an H200's host:
// 44 GB/s with pinning by 12 threads, against 29).
void touch(char* start, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t at = 0; at < bytes; at += page) static_cast<volatile char*>(start)[at] = 0;
}

// Takes the pages' memory from them. What the process has locked since is unlocked.
void give_back(char* start, uint64_t bytes) {
  if (madvise(start, bytes, MADV_DONTNEED) == 0) return;
  if (munlock(start, bytes) == 0 && madvise(start, bytes, MADV_DONTNEED) == 0) return;
  no_host_memory("giving back", bytes, errno);
}

}  // namespace

HostMedium::Mirror::Mirror(uint64_t device_address, uint64_t bytes, int node)
    : device_address_(device_address), bytes_(bytes) {
  void* const whole = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) no_host_memory("reserving addresses", bytes, errno);
  const uint64_t start = reinterpret_cast<uint64_t>(whole);
  const uint64_t before = (kHugePageBytes - start % kHugePageBytes) % kHugePageBytes;
  base_ = static_cast<char*>(whole) + before;
  if (before > 0) munmap(whole, before);
  munmap(base_ + bytes, kHugePageBytes - before);
  // A process that locks its future memory (mlockall) would get every page at once, and could not
  // give one back.
  munlock(base_, bytes);
  if (mprotect(base_, bytes, PROT_READ | PROT_WRITE) != 0) {
    const int reason = errno;
    munmap(base_, bytes);
    no_host_memory("reserving addresses", bytes, reason);
  }
  madvise(base_, bytes, MADV_HUGEPAGE);  // nine times fewer faults where the system allows it
  madvise(base_, bytes,
          MADV_DONTFORK);  // a child has no use for it, and copying its tables takes long
  prefer_node(base_, bytes, node);
}

HostMedium::Mirror::~Mirror() { munmap(base_, bytes_); }

HostMedium::~HostMedium() {
  bool all = true;
  for (auto& [address, range] : pinned_) {
    try {
      if (range.bytes() > 0) range.unpin();
    } catch (const Error& error) {
      all = all && is_shutdown(static_cast<CUresult>(error.cuda_error));
    } catch (...) {
      all = false;
    }
  }
  if (all) return;
  struct Kept {
    std::vector<std::unique_ptr<Mirror>> mirrors;
    HostClaim claim;
    std::map<uint64_t, PinnedRange> pinned;
  };
  try {
    static_cast<void>(new Kept{std::move(mirrors_), std::move(claim_), std::move(pinned_)});
  } catch (...) {
    for (auto& mirror : mirrors_) static_cast<void>(mirror.release());
  }
}

void HostMedium::cover(const std::vector<VaReservation>& spans) {
  for (const VaReservation& span : spans) {
    bool covered = false;
    for (const auto& mirror : mirrors_) covered |= mirror->device_address() == span.address();
    if (!covered) mirrors_.push_back(std::make_unique<Mirror>(span.address(), span.bytes(), node_));
  }
}

char* HostMedium::place(uint64_t address) const {
  for (const auto& mirror : mirrors_) {
    if (mirror->contains(address)) return mirror->at(address);
  }
  throw Error(Status::kInternal,
              "no place in host memory for the backup of address " + std::to_string(address));
}

void HostMedium::claim(uint64_t bytes) { claim_.grow(bytes, "a backup"); }

void HostMedium::populate(const Range& part) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    populated_[part.address] = part.bytes;
  }
  touch(place(part.address), part.bytes);
  claim_.touched(part.bytes);
}

void HostMedium::attach(const Range& cell) {
  if (kind_ == Kind::kPinned) {
    pinned_[cell.address] = PinnedRange::pin(place(cell.address), cell.bytes);
  }
}

void HostMedium::drop(const Range& cell) {
  const auto pinned = pinned_.find(cell.address);
  if (pinned != pinned_.end()) {
    if (pinned->second.bytes() > 0) pinned->second.unpin();
    pinned_.erase(pinned);
  }
  give_back(place(cell.address), cell.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t touched = 0;
  for (auto part = populated_.lower_bound(cell.address);
       part != populated_.end() && part->first < cell.end(); part = populated_.erase(part)) {
    touched += part->second;
  }
  claim_.shrink(touched);  // and what a part that could not be given back has left here
  claim_.shrink_untouched(cell.bytes - std::min(cell.bytes, touched));
}

void* HostMedium::direct(uint64_t address) const {
  return kind_ == Kind::kPinned ? place(address) : nullptr;
}

void HostMedium::write(uint64_t address, const void* source, uint64_t bytes) {
  std::memcpy(place(address), source, bytes);
}

void HostMedium::read(uint64_t address, void* target, uint64_t bytes) {
  std::memcpy(target, place(address), bytes);
}

}  // namespace memsaver
