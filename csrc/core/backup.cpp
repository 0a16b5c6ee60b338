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

uint64_t grid(uint64_t address) { return address / kCellBytes * kCellBytes; }

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
  std::map<uint64_t, Range> wanted;
  for (const Range& part : cut(widened(ranges, cell_unit()), kCellBytes)) {
    Range& bounds = wanted.try_emplace(grid(part.address), part).first->second;
    bounds.bytes = part.end() - bounds.address;
  }
  // What others held, or in other bounds, goes first: the host never holds both.
  for (auto cell = cells_.begin(); cell != cells_.end();) {
    const auto next = std::next(cell);
    const auto need = wanted.find(cell->first);
    const Range held = cell->second.bounds;
    if (need == wanted.end()) {
      try_drop(cell);
    } else if (need->second.address < held.address || held.end() < need->second.end()) {
      drop(cell);
    } else if (need->second.bytes < held.bytes) {
      try_drop(cell);  // too much; it will do, if it cannot be changed
    }
    cell = next;
  }
  std::vector<Room> room;
  uint64_t missing = 0;
  for (const auto& [key, bounds] : wanted) {
    const auto held = cells_.find(key);
    const bool fresh = held == cells_.end();
    room.push_back({fresh ? bounds : held->second.bounds, fresh});
    if (fresh) missing += bounds.bytes;
  }
  medium_->claim(missing);
  return room;
}

void BackupStore::attach(const Range& cell) {
  Cell& added = cells_[grid(cell.address)];
  try {
    medium_->attach(cell);
  } catch (...) {
    cells_.erase(grid(cell.address));
    throw;
  }
  added.bounds = cell;
  cell_bytes_ += cell.bytes;
  count();
}

void BackupStore::abandon(const Range& cell) noexcept {
  const auto attached = cells_.find(grid(cell.address));
  if (attached != cells_.end()) return try_drop(attached);
  try {
    medium_->drop(cell);
  } catch (...) {
    // Not attached, so there is nothing that could not be unpinned; blocks of a file go with it.
  }
  count();
}

const std::vector<BackupStore::Kept>& BackupStore::kept(uint64_t address) const {
  static const std::vector<Kept> nothing;
  const auto cell = cells_.find(grid(address));
  return cell == cells_.end() ? nothing : cell->second.kept;
}

void BackupStore::remember(uint64_t address, std::vector<Kept> kept) {
  const auto cell = cells_.find(grid(address));
  if (cell != cells_.end()) cell->second.kept = std::move(kept);
}

void BackupStore::forget(const Range& range) noexcept {
  for (auto cell = cells_.lower_bound(grid(range.address));
       cell != cells_.end() && cell->first < range.end(); ++cell) {
    // Left in their places: a save forgets range by range, and a cell may have 100,000 pieces.
    std::vector<Kept>& kept = cell->second.kept;
    auto at = std::upper_bound(
        kept.begin(), kept.end(), range.address,
        [](uint64_t address, const Kept& piece) { return address < piece.piece.end(); });
    for (; at != kept.end() && at->piece.address < range.end(); ++at) at->piece.bytes = 0;
  }
}

uint64_t BackupStore::release(const std::vector<Range>& needed) {
  std::set<uint64_t> cells;
  for (const Range& part : cut(needed, kCellBytes)) cells.insert(grid(part.address));
  const uint64_t held = held_bytes_;
  for (auto cell = cells_.begin(); cell != cells_.end();) {
    const auto next = std::next(cell);
    if (!cells.count(cell->first)) try_drop(cell);
    cell = next;
  }
  return held - held_bytes_;
}

}  // namespace memsaver
