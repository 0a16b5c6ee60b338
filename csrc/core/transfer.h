// transfer: moves the bytes of one heap between its device and its backup.
//
// A Save or a Restore is used by one thread, inside a DeviceScope of its device from its making to
// its end; several on one device share its copy streams. Where the backup is host memory that
// the device reaches, copies are queued and run by themselves; else they are staged, by threads,
// when finish() or wait() is called.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/backup.h"
#include "core/device.h"
#include "core/fingerprint.h"
#include "core/handles.h"
#include "core/range.h"
#include "core/staging.h"
#include "core/workers.h"

namespace memsaver {

// How far a transition's copies are. Any thread.
struct Progress {
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<uint64_t> total_bytes{0};  // shrinks where pieces are found unchanged
};

// Waits for a copy stream whatever the driver says of it; a context that is gone has no copies
// left.
void settle(Device& device, Device::Direction direction) noexcept;

// The bytes of the largest buffer through which any part of these ranges (sorted) is staged.
uint64_t staged_bytes(const std::vector<Range>& ranges);

// Brings `ranges` (as BackupStore::prepare wants them, mapped, not written to meanwhile) into the
// store. Pieces whose fingerprint is that of what the store keeps are left where they are.
class Save {
 public:
  // Makes room, and begins to fill it with pages and to hash. What is staged goes through
  // `reserve` too, which outlives this, or is null. Throws kOutOfHostMemory before any of the room
  // is touched, kBackupFailed, kDriverFailed.
  Save(Device& device, BackupStore& store, const std::vector<VaReservation>& spans,
       std::vector<Range> ranges, Progress& progress, StagingBuffer* reserve = nullptr);
  // Waits for what is queued; without finish() gives up the room that was made.
  ~Save();
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // Queues the copies of what lies below an address. Throws as the constructor.
  void queue(uint64_t end);
  // Returns when what lies below an address is in the store.
  void wait(uint64_t end);
  // Queues and waits for all, and keeps the fingerprints. The bytes copied.
  uint64_t finish();
  // What queue() has left out, so far.
  const Unchanged& unchanged() const { return unchanged_; }
  // Waits for what is queued and lets go of what is the driver's, so that the rest of its life
  // needs no DeviceScope but for room that is given up. Nothing but keep() may follow.
  void stop() noexcept;
  // Ends here instead, and leaves what has been saved in the store.
  void keep() noexcept;

 private:
  struct Strip {  // of a cell, see kStripBytes
    Range bounds;
    std::vector<Range> ranges;
    size_t first_piece = 0, piece_count = 0;
  };
  struct Cell {
    BackupStore::Room room;
    size_t first_strip = 0, strip_count = 0;
  };
  struct Mark {  // copies of what lies below `end` are done when the event is
    uint64_t end, bytes;
    Event event;
  };

  const Digest& digest(size_t piece) { return hasher_ ? hasher_->wait(piece) : digests_[piece]; }
  void add_cell(const BackupStore::Room& room, size_t* next_piece);
  void attach(const Cell& cell);
  std::vector<Range> changed(const Strip& strip);
  void copy(const std::vector<Range>& ranges);
  void mark(uint64_t end);
  void run_staged();
  void remember();  // keeps the fingerprints, once, when all bytes are in the store

  Device& device_;
  BackupStore& store_;
  Progress& progress_;
  StagingBuffer* const reserve_;
  std::vector<Range> ranges_;  // joined within a cell
  std::vector<Cell> cells_;
  std::vector<Strip> strips_;    // of the cells, in order
  std::vector<Range> pieces_;    // of the fingerprints
  std::vector<Digest> digests_;  // of the pieces, where the host computes them
  std::unique_ptr<Fingerprinter> hasher_;
  std::unique_ptr<Workers> populating_;  // the fresh cells, strip by strip
  size_t next_cell_ = 0, next_strip_ = 0, next_fresh_ = 0, next_mark_ = 0;
  std::vector<Mark> marks_;
  std::vector<Range> staged_;  // what run_staged() is to copy
  uint64_t marked_bytes_ = 0, copied_bytes_ = 0;
  Unchanged unchanged_;
  bool remembered_ = false, finished_ = false, stopped_ = false;
};

// Brings bytes back from a store.
class Restore {
 public:
  // `saved` (sorted) is what the store holds, `ranges` (sorted) what of it is wanted; `reserve` as
  // for a Save.
  Restore(Device& device, BackupStore& store, std::vector<Range> saved, std::vector<Range> ranges,
          Progress& progress, StagingBuffer* reserve = nullptr);
  ~Restore();  // waits for what is queued
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  // Queues the copies of what lies in a range, which is mapped now. Throws kDriverFailed.
  void queue(const Range& mapped);
  // Does the queued copies of staged backups, and returns when they are done. No effect on others.
  // Throws as BackupStore::read, and kOutOfHostMemory, kDriverFailed.
  void run_staged();
  // Returns when everything is there. The bytes copied.
  uint64_t finish();

 private:
  Device& device_;
  BackupStore& store_;
  Progress& progress_;
  StagingBuffer* const reserve_;
  const std::vector<Range> saved_, ranges_;
  std::vector<Range> staged_;
  uint64_t queued_bytes_ = 0, copied_bytes_ = 0;
  bool queued_ = false;
};

}  // namespace memsaver
