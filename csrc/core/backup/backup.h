// backup: the saved bytes of one tag on one device, in backup chunks of a backing store, with their
// fingerprints. This unit does not depend on tags, states or streams.
//
// Storage is divided into backup chunks that are sized to the ranges in them. A chunk contains one
// range of 64 MiB or more, or all smaller ranges that begin in the same aligned 64 MiB window. The
// chunk also contains any ranges that share pages with these ranges. A chunk contains whole ranges,
// because a device copy must stay within one pinned region, and a tensor, which is in one range,
// must be copied in one call. (A range of less than 1 MiB may be split between two chunks if many
// such ranges share pages; torch's ranges are larger.) A store on another device copies pieces of a
// tensor separately. In such a store, longer chunks are split so that part of a tensor can fit on
// the other device. Chunks keep their contents until other ranges are prepared or release() is
// called, so unchanged contents need not be saved again.
//
// After a failed read, check, write or reservation in its backing store, a BackupStore is unsound:
// its contents can still be read, with the same checks, but the next save uses a new store. A
// damaged copy is therefore never used as a backup again, and the new file is created in the
// current disk_dir. A transition whose restore fails marks the tag's stores on all devices as
// unsound.
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

// The kind of storage for the contents of a paused tag.
enum class Backup : int32_t { kNone = 0, kHost = 1, kPageable = 2, kDisk = 3, kPeer = 4 };

const char* name_of(Backup backup);

// The number and size of the pieces that a save did not copy because their fingerprints match those
// in the store.
struct Unchanged {
  uint64_t pieces = 0, bytes = 0;
};

// Not thread-safe, except for functions marked "Any thread": the caller must own the tag's Hold
// (allocation.h).
class BackupStore {
 public:
  // Creates an empty store; `kind` must not be kNone. Throws kBackupFailed, or kBadConfig if no
  // file can be created in the directory of option disk_dir.
  static std::unique_ptr<BackupStore> make(Backup kind, const Device& device);
  BackupStore(Backup kind, std::unique_ptr<BackingStore> backing)
      : kind_(kind), backing_(std::move(backing)) {}

  Backup kind() const { return kind_; }
  // Returns whether the store is sound. The next save may use only a sound store. Any thread.
  bool is_sound() const { return sound_; }
  // Marks the store as unsound. Any thread.
  void distrust() { sound_ = false; }

  // A prepared chunk, and whether it is new.
  struct Room {
    Range chunk;
    bool fresh;  // must be populated, then attached
  };
  // Prepares chunks for `ranges` (sorted, disjoint, inside `spans`) and returns the chunks in
  // address order. Each range stays in one chunk, unless the store is on another device. Drops
  // chunks of other ranges and claims missing chunks. Throws the same errors as
  // BackingStore::claim, before any memory is touched. The backup of other ranges may be lost, so
  // call this function only when no earlier backup is needed.
  std::vector<Room> prepare(const std::vector<VaReservation>& spans,
                            const std::vector<Range>& ranges);
  // A new chunk needs two steps. First, populate() is called for each of its copy chunks, on any
  // thread. Then attach() is called inside a DeviceScope. Both throw kOutOfHostMemory and
  // kBackupFailed.
  void populate(const Range& copy_chunk);
  void attach(const Range& chunk);
  // Drops a chunk of a failed save, whether attached or not, and its claim.
  void abandon(const Range& chunk) noexcept;

  // Returns the end of the chunk or copy chunk that contains `address`, whichever comes first; a
  // copy must not extend beyond this end. Throws kInternal if the address is in no attached chunk.
  uint64_t copy_end(uint64_t address) const;
  // The next functions return the places of saved bytes (see backing_store.h). The chunks must be
  // attached.
  bool is_direct() const { return kind_ == Backup::kHost || kind_ == Backup::kPeer; }
  uint64_t peer(uint64_t address) const { return backing_->peer(address); }
  void* direct(uint64_t address) const { return backing_->direct(address); }
  void* view(uint64_t address) const { return backing_->view(address); }
  void write(uint64_t address, const void* source, uint64_t bytes);
  // Also throws kBackupFailed if a piece of a disk backup in the range does not match its stored
  // fingerprint. The range must consist of whole pieces, divided in the same way as in the save.
  // Allocates host memory only for error messages.
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

  // Releases the chunks that contain none of the ranges `needed` (sorted). Returns the number of
  // released bytes.
  uint64_t release(const std::vector<Range>& needed);

  // These functions return the host memory, the disk space and the other device's memory in use, in
  // bytes. Space that a file system cannot free is included until the last chunk is released. Any
  // thread.
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
  void drop(Chunks::iterator chunk);                      // if it throws, the chunk is kept
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

// The size of copy chunks. Backup chunks are populated and copied in copy chunks, which end at
// multiples of this size. Copies of 64 MiB reach the bus's full rate.
constexpr uint64_t kCopyChunkBytes = 64ull << 20;

}  // namespace memsaver
