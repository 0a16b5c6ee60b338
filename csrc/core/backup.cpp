#include "core/backup.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "core/file_medium.h"
#include "core/host_medium.h"
#include "core/log.h"
#include "core/options.h"
#include "core/status.h"

namespace memsaver {
namespace {

// Stores that were ended while some of their memory could not be unpinned.
struct Retired {
  std::mutex mutex;
  std::vector<std::pair<std::unique_ptr<BackupStore>, const Device*>> stores;
};

Retired& retired() {
  static Retired* const instance = new Retired;
  return *instance;
}

// The cells for some ranges (see backup.h), in address order. Ranges that have a page in common are
// as one.
std::vector<Range> cells_for(const std::vector<Range>& ranges) {
  const uint64_t unit = cell_unit();
  std::vector<Range> cells;
  uint64_t strip = 0;          // where the last of them begins
  bool may_have_more = false;  // it has no large range
  for (const Range& range : ranges) {
    const uint64_t begin = range.address / unit * unit;
    const uint64_t end = (range.end() + unit - 1) / unit * unit;
    const bool is_large = range.bytes >= kStripBytes;
    const bool shares = !cells.empty() && begin < cells.back().end();
    if (shares || (may_have_more && !is_large && begin / kStripBytes == strip)) {
      cells.back().bytes = std::max(end, cells.back().end()) - cells.back().address;
      may_have_more = may_have_more && !is_large;
    } else {
      cells.push_back({begin, end - begin});
      strip = begin / kStripBytes;
      may_have_more = !is_large;
    }
  }
  return cells;
}

}  // namespace

uint64_t cell_unit() {
  static const uint64_t unit = std::max(kMediumUnit, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  return unit;
}

const char* name_of(Backup backup) {
  switch (backup) {
    case Backup::kNone:
      return "none";
    case Backup::kHost:
      return "host";
    case Backup::kPageable:
      return "pageable";
    case Backup::kDisk:
      return "disk";
  }
  return "unknown";
}

std::unique_ptr<BackupStore> BackupStore::make(Backup kind, const Device& device) {
  std::unique_ptr<BackupMedium> medium;
  if (kind == Backup::kDisk) {
    medium = std::make_unique<FileMedium>(path(Option::disk_dir));
  } else {
    const auto memory =
        kind == Backup::kHost ? HostMedium::Kind::kPinned : HostMedium::Kind::kPageable;
    medium = std::make_unique<HostMedium>(memory, device.numa_node());
  }
  return std::make_unique<BackupStore>(kind, std::move(medium));
}

bool BackupStore::retire(std::unique_ptr<BackupStore> store, const Device& device) noexcept {
  if (!store) return true;
  try {
    std::optional<DeviceScope> scope;
    try {
      scope.emplace(device);
    } catch (...) {
      // Without a context nothing can be unpinned, and it is kept.
    }
    // A file gives all back with its end; pages that are still pinned must not be somebody else's.
    if (store->kind_ != Backup::kDisk) store->release({});
    if (store->host_bytes() == 0) {
      store.reset();
      return true;
    }
    std::lock_guard<std::mutex> lock(retired().mutex);
    retired().stores.emplace_back(std::move(store), &device);
  } catch (...) {
    static_cast<void>(store.release());  // no memory to keep it by: its pages stay claimed
  }
  return false;
}

uint64_t BackupStore::collect_retired() noexcept {
  decltype(Retired::stores) stores;
  {
    std::lock_guard<std::mutex> lock(retired().mutex);
    stores.swap(retired().stores);
  }
  uint64_t released = 0;
  for (auto& [store, device] : stores) {
    const uint64_t held = store->host_bytes();
    if (retire(std::move(store), *device)) released += held;
  }
  return released;
}

void BackupStore::drop(Cells::iterator cell) {
  const Range bounds = cell->second.bounds;
  cell->second.kept.clear();  // a drop that fails may have taken a part
  medium_->drop(bounds);
  cells_.erase(cell);
  cell_bytes_ -= bounds.bytes;
  count();
}

void BackupStore::count() { held_bytes_ = cell_bytes_ + medium_->unreturned_bytes(); }

void BackupStore::try_drop(Cells::iterator cell) noexcept try {
  drop(cell);
} catch (const Error& error) {
  warn_of([&] { return error.message + "; memory of a backup stays held for now"; });
} catch (...) {
  // Out of host memory for a message: the cell stays, as above.
}

std::vector<BackupStore::Room> BackupStore::prepare(const std::vector<VaReservation>& spans,
                                                    const std::vector<Range>& ranges) {
  medium_->cover(spans);
  const std::vector<Range> wanted = cells_for(ranges);
  // What others held, or in other bounds, goes first: the host never holds both.
  auto need = wanted.begin();
  for (auto cell = cells_.begin(); cell != cells_.end();) {
    const auto next = std::next(cell);
    const Range held = cell->second.bounds;
    while (need != wanted.end() && need->end() <= held.address) ++need;
    if (need == wanted.end() || held.end() <= need->address) {
      try_drop(cell);
    } else if (need->address < held.address || held.end() < need->end()) {
      drop(cell);
    } else if (std::next(need) != wanted.end() && std::next(need)->address < held.end()) {
      drop(cell);
    } else if (need->bytes < held.bytes) {
      try_drop(cell);  // too much; it will do, if it cannot be changed
    }
    cell = next;
  }
  std::vector<Room> room;
  uint64_t missing = 0;
  for (const Range& bounds : wanted) {
    const auto held = around(bounds.address);
    const bool fresh = held == cells_.end() || held->second.bounds.address > bounds.address;
    room.push_back({fresh ? bounds : held->second.bounds, fresh});
    if (fresh) missing += bounds.bytes;
  }
  medium_->claim(missing);
  return room;
}

BackupStore::Cells::const_iterator BackupStore::around(uint64_t address) const {
  const auto behind = cells_.upper_bound(address);
  if (behind == cells_.begin()) return behind;
  const auto before = std::prev(behind);
  return address < before->second.bounds.end() ? before : behind;
}

std::vector<Range> BackupStore::cut_for_copies(const std::vector<Range>& ranges) const {
  std::vector<Range> parts;
  for (const Range& range : ranges) {
    for (auto cell = around(range.address);
         cell != cells_.end() && cell->second.bounds.address < range.end(); ++cell) {
      const Range& bounds = cell->second.bounds;
      const uint64_t begin = std::max(bounds.address, range.address);
      parts.push_back({begin, std::min(bounds.end(), range.end()) - begin});
    }
  }
  if (total(parts) != total(ranges)) {
    throw Error(Status::kInternal, "there is no room that holds the backup of some saved memory");
  }
  return cut(parts, kStripBytes);
}

void BackupStore::attach(const Range& cell) {
  Cell& added = cells_[cell.address];
  added.bounds = cell;
  try {
    medium_->attach(cell);
  } catch (...) {
    cells_.erase(cell.address);
    throw;
  }
  cell_bytes_ += cell.bytes;
  count();
}

void BackupStore::abandon(const Range& cell) noexcept {
  const auto attached = cells_.find(cell.address);
  if (attached != cells_.end()) return try_drop(attached);
  try {
    medium_->drop(cell);
  } catch (...) {
    // Not attached, so there is nothing that could not be unpinned; blocks of a file go with it.
  }
  count();
}

std::vector<BackupStore::Kept> BackupStore::kept(const Range& range) const {
  const auto begins_before = [](const Kept& piece, uint64_t address) {
    return piece.piece.address < address;
  };
  std::vector<Kept> found;
  for (auto cell = around(range.address);
       cell != cells_.end() && cell->second.bounds.address < range.end(); ++cell) {
    const std::vector<Kept>& all = cell->second.kept;
    const auto first = std::lower_bound(all.begin(), all.end(), range.address, begins_before);
    found.insert(found.end(), first,
                 std::lower_bound(first, all.end(), range.end(), begins_before));
  }
  return found;
}

void BackupStore::remember(uint64_t address, std::vector<Kept> kept) {
  const auto cell = cells_.find(address);
  if (cell != cells_.end()) cell->second.kept = std::move(kept);
}

void BackupStore::forget(const Range& range) noexcept {
  const auto first = around(range.address);
  if (first == cells_.end()) return;
  for (auto cell = cells_.find(first->first); cell != cells_.end() && cell->first < range.end();
       ++cell) {
    // Left in their places: a save forgets range by range, and a cell may have 100,000 pieces.
    std::vector<Kept>& kept = cell->second.kept;
    auto at = std::upper_bound(
        kept.begin(), kept.end(), range.address,
        [](uint64_t address, const Kept& piece) { return address < piece.piece.end(); });
    for (; at != kept.end() && at->piece.address < range.end(); ++at) at->piece.bytes = 0;
  }
}

uint64_t BackupStore::release(const std::vector<Range>& needed) {
  const uint64_t held = held_bytes_;
  for (auto cell = cells_.begin(); cell != cells_.end();) {
    const auto next = std::next(cell);
    if (within(needed, cell->second.bounds).empty()) try_drop(cell);
    cell = next;
  }
  return held - held_bytes_;
}

}  // namespace memsaver
