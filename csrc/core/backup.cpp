#include "core/backup.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "core/log.h"
#include "core/status.h"
#include "core/text.h"

namespace memsaver {
namespace {

// The grid: copies of 64 MiB run at the bus's full rate, and a cell is pinned in a few
// milliseconds.
constexpr uint64_t kCellBytes = 64ull << 20;

constexpr uint64_t kHugePageBytes = 2ull << 20;

uint64_t page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

[[noreturn]] void no_host_memory(const std::string& what, uint64_t bytes, int reason) {
  Error error(Status::kOutOfHostMemory,
              what + " of " + format_bytes(bytes) +
                  " of host memory for a backup failed: " + std::strerror(reason) +
                  "; free host memory, raise the limit, or use backup='none'");
  error.needed_bytes = bytes;
  throw error;
}

// Gives every page of the range memory, or throws: a page that cannot be had must not be met by the
// copy.
void populate(char* start, uint64_t bytes) {
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14; older C libraries do not name it
#endif
  if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) no_host_memory("taking", bytes, errno);
  for (uint64_t at = 0; at < bytes; at += page_bytes()) start[at] = 0;
}

}  // namespace

HostBackup::Mirror::Mirror(uint64_t device_address, uint64_t bytes)
    : device_address_(device_address), bytes_(bytes) {
  void* const whole = mmap(nullptr, bytes + kHugePageBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) no_host_memory("reserving addresses", bytes, errno);
  const uint64_t start = reinterpret_cast<uint64_t>(whole);
  const uint64_t before = (kHugePageBytes - start % kHugePageBytes) % kHugePageBytes;
  base_ = static_cast<char*>(whole) + before;
  if (before > 0) munmap(whole, before);
  munmap(base_ + bytes, kHugePageBytes - before);
  madvise(base_, bytes, MADV_HUGEPAGE);  // nine times fewer faults where the system allows it
  madvise(base_, bytes,
          MADV_DONTFORK);  // a child has no use for it, and copying its tables takes long
}

HostBackup::Mirror::~Mirror() { munmap(base_, bytes_); }

HostBackup::Mirror& HostBackup::mirror_of(const VaReservation& span) {
  for (const auto& mirror : mirrors_) {
    if (mirror->device_address() == span.address()) return *mirror;
  }
  mirrors_.push_back(std::make_unique<Mirror>(span.address(), span.bytes()));
  return *mirrors_.back();
}

void* HostBackup::host(uint64_t address) const {
  for (const auto& mirror : mirrors_) {
    if (mirror->contains(address)) return mirror->at(address);
  }
  throw Error(Status::kInternal,
              "no host memory was prepared for address " + std::to_string(address));
}

void HostBackup::drop(std::map<uint64_t, PinnedRange>::iterator cell) {
  char* const start = reinterpret_cast<char*>(cell->second.address());
  const uint64_t bytes = cell->second.bytes();
  cell->second.unpin();
  cells_.erase(cell);
  held_bytes_ -= bytes;
  madvise(start, bytes, MADV_DONTNEED);
}

void HostBackup::try_drop(std::map<uint64_t, PinnedRange>::iterator cell) noexcept try {
  drop(cell);
} catch (const Error& error) {
  warn_of([&] { return error.message + "; host memory of a backup stays pinned for now"; });
} catch (...) {
  // Out of host memory for a message: the cell stays, as above.
}

void HostBackup::prepare(const std::vector<VaReservation>& spans,
                         const std::vector<Range>& ranges) {
  // The part of each cell that is needed, as host addresses on page boundaries.
  std::map<uint64_t, std::pair<char*, char*>> wanted;
  for (const Range& range : ranges) {
    const auto span = std::find_if(spans.begin(), spans.end(), [&](const VaReservation& candidate) {
      return range.address - candidate.address() < candidate.bytes();
    });
    if (span == spans.end()) throw Error(Status::kInternal, "a range to back up lies in no span");
    const Mirror& mirror = mirror_of(*span);
    for (uint64_t at = range.address; at < range.end();) {
      const uint64_t cell = at / kCellBytes * kCellBytes;
      const uint64_t end = std::min(range.end(), cell + kCellBytes);
      const uint64_t page = page_bytes();
      char* const low =
          reinterpret_cast<char*>(reinterpret_cast<uint64_t>(mirror.at(at)) / page * page);
      char* const high = reinterpret_cast<char*>(
          (reinterpret_cast<uint64_t>(mirror.at(end - 1)) / page + 1) * page);
      const auto [entry, fresh] = wanted.try_emplace(cell, low, high);
      if (!fresh) {
        entry->second.first = std::min(entry->second.first, low);
        entry->second.second = std::max(entry->second.second, high);
      }
      at = end;
    }
  }
  // What others held, or in other bounds, goes first: the host never holds both.
  for (auto cell = cells_.begin(); cell != cells_.end();) {
    const auto need = wanted.find(cell->first);
    const auto next = std::next(cell);
    if (need == wanted.end()) {
      try_drop(cell);
    } else {
      const auto low = reinterpret_cast<uint64_t>(need->second.first);
      const auto high = reinterpret_cast<uint64_t>(need->second.second);
      const PinnedRange& pinned = cell->second;
      const uint64_t end = pinned.address() + pinned.bytes();
      const bool covers = pinned.address() <= low && high <= end;
      if (covers && (pinned.address() < low || high < end)) {
        try_drop(cell);  // too much; it will do, if it cannot be changed
      } else if (!covers) {
        drop(cell);
      }
    }
    cell = next;
  }
  std::vector<uint64_t> added;
  try {
    for (const auto& [cell, bounds] : wanted) {
      if (cells_.count(cell)) continue;
      const uint64_t bytes = static_cast<uint64_t>(bounds.second - bounds.first);
      populate(bounds.first, bytes);
      try {
        cells_.emplace(cell, PinnedRange::pin(bounds.first, bytes));
      } catch (...) {
        madvise(bounds.first, bytes, MADV_DONTNEED);
        throw;
      }
      held_bytes_ += bytes;
      added.push_back(cell);
    }
  } catch (...) {
    for (const uint64_t cell : added) try_drop(cells_.find(cell));
    throw;
  }
}

std::vector<Range> HostBackup::pieces(const std::vector<Range>& ranges) const {
  std::vector<Range> cut;
  for (const Range& range : ranges) {
    for (uint64_t at = range.address; at < range.end();) {
      const uint64_t end = std::min(range.end(), (at / kCellBytes + 1) * kCellBytes);
      cut.push_back({at, end - at});
      at = end;
    }
  }
  return cut;
}

uint64_t HostBackup::release(const std::vector<Range>& kept) {
  std::set<uint64_t> needed;
  for (const Range& piece : pieces(kept)) needed.insert(piece.address / kCellBytes * kCellBytes);
  const uint64_t held = held_bytes_;
  for (auto cell = cells_.begin(); cell != cells_.end();) {
    const auto next = std::next(cell);
    if (!needed.count(cell->first)) try_drop(cell);
    cell = next;
  }
  return held - held_bytes_;
}

}  // namespace memsaver
