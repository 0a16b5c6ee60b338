#include "core/backup/backup.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/backup/file_backing_store.h"
#include "core/backup/host_backing_store.h"
#include "core/backup/peer_backing_store.h"
#include "core/platform/log.h"
#include "core/platform/options.h"
#include "core/platform/status.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

// Blocks smaller than the device's granularity may form unbounded chains through shared pages. A
// chain that has reached kLongBytes is cut at the next block smaller than kSmallBytes.
constexpr uint64_t kLongBytes = 2 * kCopyChunkBytes;
constexpr uint64_t kSmallBytes = 1ull << 20;

// The longest chunk on another device: large enough to be allocated and released quickly, small
// enough that little of the free memory there stays unused.
constexpr uint64_t kPeerChunkBytes = 256ull << 20;

// Returns the chunks for some ranges (see backup.h), in address order.
std::vector<Range> chunks_for(const std::vector<Range>& ranges) {
  const uint64_t unit = chunk_unit();
  std::vector<Range> chunks;
  bool is_open = false;  // the last chunk accepts more ranges
  for (const Range& range : ranges) {
    uint64_t begin = range.address / unit * unit;
    const uint64_t end = (range.end() + unit - 1) / unit * unit;
    const bool is_large = range.bytes >= kCopyChunkBytes;
    if (!chunks.empty()) {
      Range& last = chunks.back();
      const bool may_be_cut = range.bytes < kSmallBytes && last.bytes >= kLongBytes;
      const bool shares_a_page = begin < last.end() && !may_be_cut;
      const bool begins_near = begin / kCopyChunkBytes == last.address / kCopyChunkBytes;
      if (shares_a_page || (is_open && begins_near && !is_large)) {
        last.bytes = std::max(end, last.end()) - last.address;
        is_open = is_open && !is_large;
        continue;
      }
      begin = std::max(begin, last.end());
    }
    if (begin == end) continue;
    chunks.push_back({begin, end - begin});
    is_open = !is_large;
  }
  return chunks;
}

// The slack that a chunk may have before it is rebuilt. Without slack, a tensor allocated or freed
// beside or inside a large range would cause the whole range to be pinned and copied again.
uint64_t slack_of(const Range& chunk) {
  return chunk.bytes > kCopyChunkBytes ? chunk.bytes / 16 : 0;
}

// Advice appended to the error message of a failed backup read.
constexpr const char* kLost =
    "; the tag stays paused. If resuming it again fails too, free its tensors (with torch, call "
    "torch.cuda.empty_cache() afterwards), resume it, and load its contents again from their "
    "source; the next pause writes a new file";

}  // namespace

uint64_t chunk_unit() {
  static const uint64_t unit = std::max(kBackingUnit, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
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
    case Backup::kPeer:
      return "peer";
  }
  return "unknown";
}

std::unique_ptr<BackupStore> BackupStore::make(Backup kind, const Device& device) {
  std::unique_ptr<BackingStore> backing;
  if (kind == Backup::kDisk) {
    backing = std::make_unique<FileBackingStore>(path(Option::disk_dir));
  } else if (kind == Backup::kPeer) {
    backing = std::make_unique<PeerBackingStore>(device);
  } else {
    const auto memory =
        kind == Backup::kHost ? HostBackingStore::Kind::kPinned : HostBackingStore::Kind::kPageable;
    backing = std::make_unique<HostBackingStore>(memory, device);
  }
  return std::make_unique<BackupStore>(kind, std::move(backing));
}

template <typename Call>
void BackupStore::watch(Call call) try {
  call();
} catch (const Error& error) {
  if (error.status == Status::kBackupFailed) sound_ = false;
  throw;
}

void BackupStore::populate(const Range& copy_chunk) {
  watch([&] { backing_->populate(copy_chunk); });
}

void BackupStore::write(uint64_t address, const void* source, uint64_t bytes) {
  watch([&] { backing_->write(address, source, bytes); });
}

void BackupStore::read(uint64_t address, void* target, uint64_t bytes) {
  watch([&] {
    try {
      backing_->read(address, target, bytes);
      if (kind_ == Backup::kDisk) check({address, bytes}, static_cast<const char*>(target));
    } catch (Error& error) {
      error.addition = kLost;
      throw;
    }
  });
}

template <typename Call>
void BackupStore::for_each_kept(const Range& range, Call call) const {
  const auto begins_before = [](const Kept& piece, uint64_t address) {
    return piece.piece.address < address;
  };
  for (auto chunk = around(range.address);
       chunk != chunks_.end() && chunk->second.bounds.address < range.end(); ++chunk) {
    const std::vector<Kept>& all = chunk->second.kept;
    auto each = std::lower_bound(all.begin(), all.end(), range.address, begins_before);
    for (; each != all.end() && each->piece.address < range.end(); ++each) call(*each);
  }
}

void BackupStore::check(const Range& range, const char* bytes) const {
  for_each_kept(range, [&](const Kept& each) {
    if (each.piece.bytes == 0 || each.piece.end() > range.end()) return;
    if (fingerprint_of(bytes + (each.piece.address - range.address), each.piece.bytes) ==
        each.digest) {
      return;
    }
    Error error(Status::kBackupFailed,
                "the backup on disk is corrupt: " + format_bytes(each.piece.bytes) +
                    " read from it do not match their fingerprint");
    error.needed_bytes = each.piece.bytes;
    throw error;
  });
}

void BackupStore::drop(Chunks::iterator chunk) {
  const Range bounds = chunk->second.bounds;
  const uint64_t peer_bytes = backing_->peer_bytes(bounds);
  chunk->second.kept.clear();  // a failed drop may have released part of the chunk
  watch([&] { backing_->drop(bounds); });
  chunks_.erase(chunk);
  peer_bytes_ -= peer_bytes;
  if (peer_bytes == 0) chunk_bytes_ -= bounds.bytes;
  count();
}

void BackupStore::count() { held_bytes_ = chunk_bytes_ + backing_->unreturned_bytes(); }

void BackupStore::try_drop(Chunks::iterator chunk) noexcept try {
  drop(chunk);
} catch (const Error& error) {
  warn_of([&] { return error.message + "; some memory of a backup could not be released yet"; });
} catch (...) {
  // Without host memory for a message, the chunk stays, as above.
}

std::vector<BackupStore::Room> BackupStore::prepare(const std::vector<VaReservation>& spans,
                                                    const std::vector<Range>& ranges) {
  backing_->cover(spans);
  std::vector<Range> wanted = chunks_for(ranges);
  if (kind_ == Backup::kPeer) wanted = cut(wanted, kPeerChunkBytes);
  // Chunks that are no longer needed, or have the wrong bounds, are dropped first, so that old and
  // new chunks are never allocated at the same time.
  auto need = wanted.begin();
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    const auto next = std::next(chunk);
    const Range held = chunk->second.bounds;
    while (need != wanted.end() && need->end() <= held.address) ++need;
    bool reaches_beyond = false;
    uint64_t bytes = 0;
    for (auto inside = need; inside != wanted.end() && inside->address < held.end(); ++inside) {
      reaches_beyond |= inside->address < held.address || held.end() < inside->end();
      bytes += inside->bytes;
    }
    if (reaches_beyond) {
      drop(chunk);
    } else if (bytes == 0 || held.bytes - bytes > slack_of(held)) {
      try_drop(chunk);  // more slack than allowed; usable if it cannot be dropped
    }
    chunk = next;
  }
  std::vector<Room> room;
  std::vector<Range> missing;
  for (const Range& bounds : wanted) {
    const auto held = around(bounds.address);
    if (held == chunks_.end() || held->first > bounds.address) {
      room.push_back({bounds, true});
      missing.push_back(bounds);
    } else if (room.empty() || room.back().chunk.address != held->first) {
      room.push_back({held->second.bounds, false});
    }
  }
  backing_->claim(missing);
  return room;
}

BackupStore::Chunks::const_iterator BackupStore::around(uint64_t address) const {
  const auto behind = chunks_.upper_bound(address);
  if (behind == chunks_.begin()) return behind;
  const auto before = std::prev(behind);
  return address < before->second.bounds.end() ? before : behind;
}

uint64_t BackupStore::copy_end(uint64_t address) const {
  const auto chunk = around(address);
  if (chunk == chunks_.end() || chunk->second.bounds.address > address) {
    throw Error(Status::kInternal, "the backup store has no chunk for part of the saved memory");
  }
  return std::min(chunk->second.bounds.end(), (address / kCopyChunkBytes + 1) * kCopyChunkBytes);
}

void BackupStore::attach(const Range& chunk) {
  Chunk& added = chunks_[chunk.address];
  added.bounds = chunk;
  try {
    backing_->attach(chunk);
  } catch (...) {
    chunks_.erase(chunk.address);
    throw;
  }
  const uint64_t peer_bytes = backing_->peer_bytes(chunk);
  peer_bytes_ += peer_bytes;
  if (peer_bytes == 0) chunk_bytes_ += chunk.bytes;
  count();
}

void BackupStore::abandon(const Range& chunk) noexcept {
  const auto attached = chunks_.find(chunk.address);
  if (attached != chunks_.end()) return try_drop(attached);
  try {
    backing_->drop(chunk);
  } catch (...) {
    // The chunk is not attached, so nothing is pinned; the file frees its own blocks.
  }
  count();
}

std::vector<BackupStore::Kept> BackupStore::kept(const Range& range) const {
  std::vector<Kept> found;
  for_each_kept(range, [&found](const Kept& each) { found.push_back(each); });
  return found;
}

void BackupStore::remember(const Range& chunk, std::vector<Kept> kept) {
  chunks_.at(chunk.address).kept = std::move(kept);
}

void BackupStore::forget(const Range& range) noexcept {
  auto chunk = chunks_.upper_bound(range.address);
  if (chunk != chunks_.begin()) --chunk;
  for (; chunk != chunks_.end() && chunk->first < range.end(); ++chunk) {
    // Entries are emptied, not erased: a save calls this for one range at a time, and erasing from
    // a vector of up to 100,000 pieces each time would be quadratic.
    std::vector<Kept>& kept = chunk->second.kept;
    auto at = std::upper_bound(
        kept.begin(), kept.end(), range.address,
        [](uint64_t address, const Kept& piece) { return address < piece.piece.end(); });
    for (; at != kept.end() && at->piece.address < range.end(); ++at) at->piece.bytes = 0;
  }
}

uint64_t BackupStore::release(const std::vector<Range>& needed) {
  const uint64_t held = held_bytes_ + peer_bytes_;
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    const auto next = std::next(chunk);
    if (within(needed, chunk->second.bounds).empty()) try_drop(chunk);
    chunk = next;
  }
  return held - held_bytes_ - peer_bytes_;
}

}  // namespace memsaver
