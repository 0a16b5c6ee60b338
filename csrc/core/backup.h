// backup: the saved bytes of one tag on one device: what is kept, in which cells of a medium, and
// with which fingerprints. It knows nothing of tags, states or streams.
//
// Room is held in cells, as large as the ranges in it need: a large range, or those that begin in
// the same 64 MiB, and what shares pages with them. A cell has whole ranges, because one copy of a
// device goes to or from memory that is pinned in one piece, and whoever copies a tensor, which is
// in one range, does it in one call. (A range of less than 1 MiB may be in two, where many such
// share pages: never one that torch has.) Cells stay, contents and all, until other ranges are
// prepared or release() is called: so what has not changed since need not be saved again.
//
// After a failed read, check, write or reservation of its backing store, a BackupStore is not
// sound: its contents can still be read, and are checked as before, but the next save uses a new
// store. So a damaged copy never becomes a backup again, and the new file is made in the current
// disk_dir.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/backup_medium.h"
#include "core/device.h"
#include "core/fingerprint.h"
#include "core/range.h"

namespace memsaver {

// Where the contents of a paused tag are kept.
enum class Backup : int32_t { kNone = 0, kHost = 1, kPageable = 2, kDisk = 3 };

const char* name_of(Backup backup);

// What a save has found in its store already, by fingerprints.
struct Unchanged {
  uint64_t pieces = 0, bytes = 0;
};

// Not thread-safe but for its figures: its tag is held while it changes.
class BackupStore {
 public:
  // An empty store of a kind other than kNone. Throws kBackupFailed, kBadConfig (no file can be
  // made in option disk_dir).
  static std::unique_ptr<BackupStore> make(Backup kind, const Device& device);
  // Ends a store (or null); false where some of it cannot be given back yet: that is kept, claimed,
  // for collect_retired(). Any thread, in a DeviceScope or not.
  static bool retire(std::unique_ptr<BackupStore> store, const Device& device) noexcept;
  // Ends the stores that retire() kept; returns the bytes that they released. Any thread, in a
  // DeviceScope or not.
  static uint64_t collect_retired() noexcept;

  BackupStore(Backup kind, std::unique_ptr<BackupMedium> medium)
      : kind_(kind), medium_(std::move(medium)) {}

  Backup kind() const { return kind_; }
  // Returns whether another save may use the store, see above. Any thread.
  bool is_sound() const { return sound_; }

  // What a cell needs to be ready for copies.
  struct Room {
    Range cell;
    bool fresh;  // to be populated, then attached
  };
  // Makes room for these ranges (sorted, disjoint, inside `spans`; what must be in one cell is one
  // range), in address order: drops the cells that others needed, claims what is missing.
  // Throws kOutOfHostMemory before any of it is touched; what backed other ranges may be gone, so
  // the caller prepares only when it needs no earlier backup any more.
  std::vector<Room> prepare(const std::vector<VaReservation>& spans,
                            const std::vector<Range>& ranges);
  // The two steps of a fresh cell: the first for each of its strips, on any thread, the second when
  // that is done, inside a DeviceScope. Throw kOutOfHostMemory, kBackupFailed.
  void populate(const Range& strip);
  void attach(const Range& cell);
  // Gives up a cell of a failed save, attached or not, and its claim.
  void abandon(const Range& cell) noexcept;

  // `ranges` (sorted, of attached cells) as they are copied: strip by strip, and never from one
  // cell into the next. Throws kInternal where there is no cell.
  std::vector<Range> cut_for_copies(const std::vector<Range>& ranges) const;
  // Where the bytes go (backup_medium.h). Of attached cells.
  bool is_direct() const { return kind_ == Backup::kHost; }
  void* direct(uint64_t address) const { return medium_->direct(address); }
  void* view(uint64_t address) const { return medium_->view(address); }
  void write(uint64_t address, const void* source, uint64_t bytes);
  // Also throws kBackupFailed if a piece of a disk backup in the range does not match the
  // fingerprint that was kept with it. The range must consist of whole pieces, as they were saved.
  void read(uint64_t address, void* target, uint64_t bytes);

  // A piece whose bytes in the store have this fingerprint. One of no bytes has been forgotten.
  struct Kept {
    Range piece;
    Digest digest;
  };
  // Those that begin in a range, in address order. Empty where nothing is known.
  std::vector<Kept> kept(const Range& range) const;
  // From now on these (in address order) are what is known of a cell that prepare() gave.
  void remember(const Range& cell, std::vector<Kept> kept);
  // Nothing is known of what lies in the range any more: it is about to be written to.
  void forget(const Range& range) noexcept;

  // Gives back the cells that back nothing of `needed` (sorted); the bytes.
  uint64_t release(const std::vector<Range>& needed);

  // Bytes held of the host's memory, and of the disk, where what a file system does not give back
  // counts until the last cell is gone. Any thread.
  uint64_t host_bytes() const { return kind_ == Backup::kDisk ? 0 : held_bytes_.load(); }
  uint64_t disk_bytes() const { return kind_ == Backup::kDisk ? held_bytes_.load() : 0; }

 private:
  struct Cell {
    Range bounds;
    std::vector<Kept> kept;
  };
  using Cells = std::map<uint64_t, Cell>;                // by their address
  Cells::const_iterator around(uint64_t address) const;  // or behind it, else end()
  void drop(Cells::iterator cell);                       // on a throw it is as before
  void try_drop(Cells::iterator cell) noexcept;
  void count();  // after a change of the cells
  void check(const Range& range, const char* bytes) const;
  template <typename Call>
  void watch(Call call);  // calls the backing store; if that fails, this store is not sound

  const Backup kind_;
  const std::unique_ptr<BackupMedium> medium_;
  Cells cells_;  // attached
  uint64_t cell_bytes_ = 0;
  std::atomic<uint64_t> held_bytes_{0};  // and what a medium could not give back
  std::atomic<bool> sound_{true};
};

// Cells are filled and copied in strips, cut at multiples of this: copies of 64 MiB run at the
// bus's full rate (FACTS).
constexpr uint64_t kStripBytes = 64ull << 20;

}  // namespace memsaver
