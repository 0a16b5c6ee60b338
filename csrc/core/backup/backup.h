// backup: the saved bytes of one tag on one device, in backup chunks of a backing store, with their
// fingerprints. It does not depend on tags, states or streams.
//
// Storage is divided into backup chunks that are sized to the ranges in them: one range of 64 MiB
// or more, or all smaller ranges that begin in the same aligned 64 MiB window, and any ranges that
// share pages with them. A chunk contains whole ranges, because one device copy must stay within
// one pinned region, and a tensor, which lies in one range, must be copied in one call. (A range of
// less than 1 MiB may be split between two chunks if many such ranges share pages; torch's ranges
// are larger.) In a store on another device, which copies pieces of a tensor separately, longer
// chunks are cut, so that a part of a tensor may have room there. Chunks keep their contents until
// other ranges are prepared or release() is called, so unchanged contents need not be saved again.
//
// After a failed read, check, write or reservation in its backing store, a BackupStore is unsound:
// its contents can still be read, with the same checks, but the next save uses a new store. A
// damaged copy is therefore never used as a backup again, and the new file is created in the
// current disk_dir. A transition whose restore fails distrusts the tag's stores on all devices.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/backup/backing_store.h"
#include "core/backup/fingerprint.h"
#include "core/driver/device.h"
#include "core/platform/range.h"

namespace memsaver {

// The storage for the contents of a paused tag.
enum class Backup : int32_t { kNone = 0, kHost = 1, kPageable = 2, kDisk = 3, kPeer = 4 };

const char* name_of(Backup backup);

// Counts the pieces that a save did not copy because their fingerprints match the store's.
struct Unchanged {
  uint64_t pieces = 0, bytes = 0;
};

// Not thread-safe, except where a function says "Any thread": the caller owns the tag's Hold
// (allocation.h).
class BackupStore {
 public:
  // Creates an empty store of a kind other than kNone. Throws kBackupFailed, kBadConfig (no file
  // can be created in option disk_dir).
  static std::unique_ptr<BackupStore> make(Backup kind, const Device& device);
  BackupStore(Backup kind, std::unique_ptr<BackingStore> backing)
      : kind_(kind), backing_(std::move(backing)) {}

  Backup kind() const { return kind_; }
  // Returns whether the next save may use the store (see above). Any thread.
  bool is_sound() const { return sound_; }
  // Marks the store as unsound. Any thread.
  void distrust() { sound_ = false; }

  // A prepared chunk, and whether it is new.
  struct Room {
    Range chunk;
    bool fresh;  // must be populated, then attached
  };
  // Prepares chunks for `ranges` (sorted, disjoint, inside `spans`; each range stays in one chunk,
  // except on another device) and returns them in address order. Drops chunks of other ranges, and
  // claims missing ones. Throws like BackingStore::claim, before it touches any memory. The backup
  // of other ranges may be lost, so call this only when no earlier backup is needed.
  std::vector<Room> prepare(const std::vector<VaReservation>& spans,
                            const std::vector<Range>& ranges);
  // The two steps for a new chunk: populate() for each of its copy chunks, on any thread; then
  // attach(), inside a DeviceScope. Both throw kOutOfHostMemory, kBackupFailed.
  void populate(const Range& copy_chunk);
  void attach(const Range& chunk);
  // Drops a chunk of a failed save, attached or not, with its claim.
  void abandon(const Range& chunk) noexcept;

  // Returns the end of the chunk or of the copy chunk around `address`, whichever comes first: a
  // copy must not cross it. Throws kInternal if the address is in no attached chunk.
  uint64_t copy_end(uint64_t address) const;
  // The places of the saved bytes (backing_store.h), in attached chunks only.
  bool is_direct() const { return kind_ == Backup::kHost || kind_ == Backup::kPeer; }
  uint64_t peer(uint64_t address) const { return backing_->peer(address); }
  void* direct(uint64_t address) const { return backing_->direct(address); }
  void* view(uint64_t address) const { return backing_->view(address); }
  void write(uint64_t address, const void* source, uint64_t bytes);
  // Also throws kBackupFailed if a piece of a disk backup in the range does not match its stored
  // fingerprint. The range must consist of whole pieces, as they were saved. Needs host memory only
  // for its errors.
  void read(uint64_t address, void* target, uint64_t bytes);

  // A piece and the fingerprint of its stored bytes. A size of 0 marks a discarded entry.
  struct Kept {
    Range piece;
    Digest digest;
  };
  // Returns the entries of pieces that begin in a range, in address order.
  std::vector<Kept> kept(const Range& range) const;
  // Replaces the entries of an attached chunk with `kept` (in address order).
  void remember(const Range& chunk, std::vector<Kept> kept);
  // Discards the fingerprints in a range that is about to be written to.
  void forget(const Range& range) noexcept;

  // Releases the chunks that contain none of `needed` (sorted); returns the number of bytes.
  uint64_t release(const std::vector<Range>& needed);

  // Host memory, disk space and memory of another device in use, in bytes. Space that a file system
  // cannot free counts until the last chunk is released. Any thread.
  uint64_t host_bytes() const { return kind_ == Backup::kDisk ? 0 : held_bytes_.load(); }
  uint64_t disk_bytes() const { return kind_ == Backup::kDisk ? held_bytes_.load() : 0; }
  uint64_t peer_bytes() const { return peer_bytes_; }

 private:
  struct Chunk {
    Range bounds;
    std::vector<Kept> kept;
  };
  using Chunks = std::map<uint64_t, Chunk>;               // by their address
  Chunks::const_iterator around(uint64_t address) const;  // the chunk at `address`, or the next
  void drop(Chunks::iterator chunk);                      // if it throws, the chunk stays
  void try_drop(Chunks::iterator chunk) noexcept;
  void count();  // call after every change of `chunks_`
  template <typename Call>
  void for_each_kept(const Range& range, Call call) const;  // see kept()
  void check(const Range& range, const char* bytes) const;
  template <typename Call>
  void watch(Call call);  // calls the backing store; if that fails, this store is unsound

  const Backup kind_;
  const std::unique_ptr<BackingStore> backing_;
  Chunks chunks_;             // attached
  uint64_t chunk_bytes_ = 0;  // the bytes of chunks that are not on another device
  std::atomic<uint64_t> peer_bytes_{0};
  std::atomic<uint64_t> held_bytes_{0};  // including bytes that the backing store could not release
  std::atomic<bool> sound_{true};
};

// Backup chunks are populated and copied in copy chunks, which end at multiples of this size:
// copies of 64 MiB run at the bus's full rate.
constexpr uint64_t kCopyChunkBytes = 64ull << 20;

}  // namespace memsaver
