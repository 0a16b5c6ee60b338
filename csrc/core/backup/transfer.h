// transfer: moves the bytes of one heap between its device and its backup.
//
// A Save or a Restore is used by one thread, inside a DeviceScope of its device, from construction
// to destruction; several on one device share its copy streams. If the device can access the
// backup, copies are queued and run asynchronously; otherwise threads stage them when finish(),
// wait() or run_staged() is called.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/backup/backup.h"
#include "core/backup/copy_events.h"
#include "core/backup/fingerprint.h"
#include "core/backup/staging.h"
#include "core/driver/device.h"
#include "core/driver/handles.h"
#include "core/platform/range.h"
#include "core/platform/workers.h"

namespace memsaver {

// The progress of a transition's copies. Any thread.
struct Progress {
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<uint64_t> total_bytes{0};  // shrinks as pieces are found unchanged
};

// Waits for a copy stream and ignores the driver's result: if the context is gone, no copies are in
// flight.
void wait_for_copies(Device& device, Device::Direction direction) noexcept;

// Returns the size in bytes of the largest staging buffer that these ranges (sorted) need.
uint64_t staged_bytes(const std::vector<Range>& ranges);

// Restores `ranges` (sorted, saved, mapped; whole pieces, as for BackupStore::read) on the calling
// thread, inside a DeviceScope, without host memory. When it returns or throws, no copy is in
// progress. `buffer`, of staged_bytes(ranges) or more, is used only if the device cannot access the
// store. Throws like BackupStore::read and copy_end, and kDriverFailed.
void restore_now(Device& device, BackupStore& store, const std::vector<Range>& ranges,
                 const StagingBuffer* buffer);

// Saves `ranges` (as for BackupStore::prepare; mapped, and not written to during the save) to the
// store. Skips pieces whose fingerprint equals the stored fingerprint.
class Save {
 public:
  // Prepares the chunks, and starts populating them and computing fingerprints. Staging also uses
  // `reserve`, which is null or outlives this object. Throws kBackupFailed, kDriverFailed, and
  // kOutOfHostMemory (before touching any of the chunks' memory).
  Save(Device& device, BackupStore& store, const std::vector<VaReservation>& spans,
       std::vector<Range> ranges, Progress& progress, StagingBuffer* reserve = nullptr);
  // Waits for queued copies; if neither finish() nor keep() was called, drops the new chunks.
  ~Save();
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // Queues the copies of all ranges below an address. Throws like the constructor.
  void queue(uint64_t end);
  // Waits until everything below an address is in the store.
  void wait(uint64_t end);
  // Queues and waits for all copies, stores the fingerprints, and returns the number of bytes
  // copied.
  uint64_t finish();
  // Returns the pieces that queue() has skipped so far.
  const Unchanged& unchanged() const { return unchanged_; }
  // Waits for queued copies and releases the driver objects. Afterwards the object needs no
  // DeviceScope, except to drop new chunks, and only keep() may be called.
  void stop() noexcept;
  // Ends the save early, leaving the bytes saved so far in the store.
  void keep() noexcept;

 private:
  struct CopyChunk {  // part of a chunk, see kCopyChunkBytes
    Range bounds;
    std::vector<Range> ranges;
    size_t first_piece = 0, piece_count = 0;
  };
  struct Chunk {
    BackupStore::Room room;
    size_t first_copy_chunk = 0, copy_chunk_count = 0;
  };
  struct CopyEvent {  // `event` signals that the copies below `end` are done
    uint64_t end, bytes;
    Event event;
  };

  const Digest& digest(size_t piece) { return hasher_ ? hasher_->wait(piece) : digests_[piece]; }
  void add_chunk(const BackupStore::Room& room, size_t* next_piece);
  void attach(const Chunk& chunk);
  std::vector<Range> changed(const CopyChunk& copy_chunk);
  void copy(const std::vector<Range>& ranges);
  void record_event(uint64_t end);
  void run_staged();
  void remember();  // stores the fingerprints, once, after all bytes are in the store

  Device& device_;
  BackupStore& store_;
  Progress& progress_;
  StagingBuffer* const reserve_;
  std::vector<Range> ranges_;  // joined within a chunk
  std::vector<Chunk> chunks_;
  std::vector<CopyChunk> copy_chunks_;  // the copy chunks of all chunks, in order
  std::vector<Range> pieces_;           // the pieces to fingerprint
  std::vector<Digest> digests_;         // the pieces' fingerprints, if the host computes them
  std::unique_ptr<Fingerprinter> hasher_;
  std::unique_ptr<Workers> populating_;  // the new chunks, by copy chunk
  size_t next_chunk_ = 0, next_copy_chunk_ = 0, next_fresh_ = 0, next_event_ = 0;
  std::vector<CopyEvent> events_;
  std::vector<Range> staged_;  // the ranges that run_staged() copies
  uint64_t unrecorded_bytes_ = 0, copied_bytes_ = 0;
  Unchanged unchanged_;
  bool remembered_ = false, finished_ = false, stopped_ = false;
};

// Restores bytes from a store.
class Restore {
 public:
  // `saved` (sorted): the ranges in the store. `ranges` (sorted): the ranges to restore. `reserve`:
  // as for Save.
  Restore(Device& device, BackupStore& store, std::vector<Range> saved, std::vector<Range> ranges,
          Progress& progress, StagingBuffer* reserve = nullptr);
  ~Restore();  // waits for queued copies
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  // Queues the copies into a mapped range. If `events` is not null, adds the range's addresses to
  // it, in the order of the copies. Staged backups are copied by run_staged(), which returns when
  // its copies are done: `events` is not used. Throws kDriverFailed.
  void queue(const Range& mapped, CopyEvents* events = nullptr);
  // Runs the queued copies of staged backups and returns when they are done. Has no effect on other
  // backups. Throws like BackupStore::read, and kOutOfHostMemory, kDriverFailed.
  void run_staged();
  // Waits for all copies, and returns the number of bytes copied.
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
