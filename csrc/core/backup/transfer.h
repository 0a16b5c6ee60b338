// transfer: moves the bytes of one heap between its device and its backup.
//
// A single thread uses a Save or a Restore, inside a DeviceScope of its device, from construction
// to destruction. Several such objects on one device share its copy streams. If the device can
// access the backup, copies are queued and run asynchronously. Otherwise, threads copy through
// staging buffers when finish(), wait() or run_staged() is called.
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

// The progress of a transition's copies. Any thread may use it.
struct Progress {
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<uint64_t> total_bytes{0};  // shrinks as pieces are found unchanged
};

// Waits for a copy stream. Ignores the driver's result: if the context is lost, no copies are in
// flight.
void wait_for_copies(Device& device, Device::Direction direction) noexcept;

// Returns the size in bytes of the largest staging buffer that these ranges (sorted) need.
uint64_t staged_bytes(const std::vector<Range>& ranges);

// Restores `ranges` on the calling thread, inside a DeviceScope, without allocating host memory.
// The ranges must be sorted, saved and mapped, and must consist of whole pieces, as for
// BackupStore::read. When the function returns or throws, no copy is in progress. `buffer` has at
// least staged_bytes(ranges) bytes and is used only if the device cannot access the store. Throws
// the same errors as BackupStore::read and copy_end, and kDriverFailed.
void restore_now(Device& device, BackupStore& store, const std::vector<Range>& ranges,
                 const StagingBuffer* buffer);

// Saves `ranges` to the store. The requirements of BackupStore::prepare apply; the ranges must also
// be mapped and must not be written to during the save. Skips pieces whose fingerprint equals the
// stored fingerprint.
class Save {
 public:
  // Prepares the chunks, and starts to populate them and to compute fingerprints. Staging also uses
  // `reserve`, which must be null or outlive this object. Throws kBackupFailed and kDriverFailed,
  // and throws kOutOfHostMemory before it touches any of the chunks' memory.
  Save(Device& device, BackupStore& store, const std::vector<VaReservation>& spans,
       std::vector<Range> ranges, Progress& progress, StagingBuffer* reserve = nullptr);
  // Waits for queued copies. Drops the new chunks if neither finish() nor keep() was called.
  ~Save();
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  // Queues the copies of all ranges below the address `end`. Throws the same errors as the
  // constructor.
  void queue(uint64_t end);
  // Waits until the contents of all ranges below the address `end` are in the store.
  void wait(uint64_t end);
  // Queues and waits for all copies, stores the fingerprints, and returns the number of bytes
  // copied.
  uint64_t finish();
  // Returns the pieces that queue() has skipped so far.
  const Unchanged& unchanged() const { return unchanged_; }
  // Waits for queued copies and releases the driver objects. Afterwards, only keep() may be called,
  // and the object needs a DeviceScope only to drop new chunks.
  void stop() noexcept;
  // Ends the save early and keeps the bytes that are already saved in the store.
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
  // `saved` (sorted) contains the ranges in the store. `ranges` (sorted) contains the ranges to
  // restore. `reserve` has the same meaning as for Save.
  Restore(Device& device, BackupStore& store, std::vector<Range> saved, std::vector<Range> ranges,
          Progress& progress, StagingBuffer* reserve = nullptr);
  ~Restore();  // waits for queued copies
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  // Queues the copies into a mapped range. If `events` is not null, adds the range's addresses to
  // `events` in the order of the copies. For staged backups, run_staged() makes the copies and
  // returns when they are done, so `events` is not used. Throws kDriverFailed.
  void queue(const Range& mapped, CopyEvents* events = nullptr);
  // Runs the queued copies of staged backups and returns when they are done. Has no effect on other
  // backups. Throws the same errors as BackupStore::read, and kOutOfHostMemory and kDriverFailed.
  void run_staged();
  // Waits for all copies and returns the number of copied bytes.
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
