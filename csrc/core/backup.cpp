#include "core/backup.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>

#include "core/file_medium.h"
#include "core/host_medium.h"
#include "core/log.h"
#include "core/options.h"
#include "core/status.h"
#include "core/text.h"

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

// Blocks of less than the device's granularity may hang together by shared pages without end. Where
// they do for this long, one that is small is cut.
constexpr uint64_t kLongBytes = 2 * kStripBytes;
constexpr uint64_t kSmallBytes = 1ull << 20;

// The cells for some ranges (see backup.h), in address order.
std::vector<Range> cells_for(const std::vector<Range>& ranges) {
  const uint64_t unit = cell_unit();
  std::vector<Range> cells;
  bool is_open = false;  // the last one takes more ranges
  for (const Range& range : ranges) {
    uint64_t begin = range.address / unit * unit;
    const uint64_t end = (range.end() + unit - 1) / unit * unit;
    const bool is_large = range.bytes >= kStripBytes;
    if (!cells.empty()) {
      Range& last = cells.back();
      const bool may_be_cut = range.bytes < kSmallBytes && last.bytes >= kLongBytes;
      const bool shares_a_page = begin < last.end() && !may_be_cut;
      const bool begins_near = begin / kStripBytes == last.address / kStripBytes;
      if (shares_a_page || (is_open && begins_near && !is_large)) {
        last.bytes = std::max(end, last.end()) - last.address;
        is_open = is_open && !is_large;
        continue;
      }
      begin = std::max(begin, last.end());
    }
    if (begin == end) continue;
    cells.push_back({begin, end - begin});
    is_open = !is_large;
  }
  return cells;
}

// What a cell may have more than is needed, before it is made anew: otherwise a tensor that comes
// or goes beside or inside a large range would have all of it pinned and copied again.
uint64_t slack_of(const Range& cell) { return cell.bytes > kStripBytes ? cell.bytes / 16 : 0; }

// Advice that ends the message of a failed read of a backup.
constexpr const char* kLost =
    "; the tag stays paused. If resuming it again fails too, free its tensors (with torch, call "
    "torch.cuda.empty_cache() afterwards), resume it, and load its contents again from their "
    "source; the next pause writes a new file";

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

template <typename Call>
void BackupStore::watch(Call call) try {
  call();
} catch (const Error& error) {
  if (error.status == Status::kBackupFailed) sound_ = false;
  throw;
}

void BackupStore::populate(const Range& strip) {
  watch([&] { medium_->populate(strip); });
}

void BackupStore::write(uint64_t address, const void* source, uint64_t bytes) {
  watch([&] { medium_->write(address, source, bytes); });
}

void BackupStore::read(uint64_t address, void* target, uint64_t bytes) {
  watch([&] {
    try {
      medium_->read(address, target, bytes);
      if (kind_ == Backup::kDisk) check({address, bytes}, static_cast<const char*>(target));
    } catch (Error& error) {
      error.addition = kLost;
      throw;
    }
  });
}

void BackupStore::check(const Range& range, const char* bytes) const {
  for (const Kept& each : kept(range)) {
    if (each.piece.bytes == 0 || each.piece.end() > range.end()) continue;
    if (fingerprint_of(bytes + (each.piece.address - range.address), each.piece.bytes) ==
        each.digest) {
      continue;
    }
    Error error(Status::kBackupFailed,
                "the backup on disk is corrupt: " + format_bytes(each.piece.bytes) +
                    " were read back that do not match their fingerprint");
    error.needed_bytes = each.piece.bytes;
    throw error;
  }
}

void BackupStore::drop(Cells::iterator cell) {
  const Range bounds = cell->second.bounds;
  cell->second.kept.clear();  // a drop that fails may have taken a part
  watch([&] { medium_->drop(bounds); });
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
    bool reaches_beyond = false;
    uint64_t bytes = 0;
    for (auto inside = need; inside != wanted.end() && inside->address < held.end(); ++inside) {
      reaches_beyond |= inside->address < held.address || held.end() < inside->end();
      bytes += inside->bytes;
    }
    if (reaches_beyond) {
      drop(cell);
    } else if (bytes == 0 || held.bytes - bytes > slack_of(held)) {
      try_drop(cell);  // too much; it will do, if it cannot be changed
    }
    cell = next;
  }
  std::vector<Room> room;
  uint64_t missing = 0;
  for (const Range& bounds : wanted) {
    const auto held = around(bounds.address);
    if (held == cells_.end() || held->first > bounds.address) {
      room.push_back({bounds, true});
      missing += bounds.bytes;
    } else if (room.empty() || room.back().cell.address != held->first) {
      room.push_back({held->second.bounds, false});
    }
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

void BackupStore::remember(const Range& cell, std::vector<Kept> kept) {
  cells_.at(cell.address).kept = std::move(kept);
}

void BackupStore::forget(const Range& range) noexcept {
  auto cell = cells_.upper_bound(range.address);
  if (cell != cells_.begin()) --cell;
  for (; cell != cells_.end() && cell->first < range.end(); ++cell) {
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
