#include "core/backup/transfer.h"

#include <algorithm>

#include "core/driver/driver.h"
#include "core/platform/options.h"
#include "core/platform/status.h"

namespace memsaver {
namespace {

// The number of bytes between two progress events, small enough that progress advances smoothly and
// pages are transferred early.
constexpr uint64_t kEventBytes = 256ull << 20;

// The number of threads that populate new chunks. The other CPUs pin the chunks and run the copies
// (16 CPUs: 46 GB/s with 10 threads, 35 with 16).
unsigned populating_threads() {
  const unsigned cpus = worker_count();
  return cpus - std::max(cpus * 3 / 8, std::min(cpus - 1, 1u));
}

uint64_t largest(const std::vector<Range>& pieces) {
  uint64_t bytes = 0;
  for (const Range& piece : pieces) bytes = std::max(bytes, piece.bytes);
  return bytes;
}

// Queues the copies of a saved range from a store that the device can access, and calls
// `queued(end)` after each. Needs no host memory.
template <typename Queued>
void queue_copies(Device& device, const BackupStore& store, const Range& range, Queued queued) {
  CUstream stream = device.copy_stream(Device::Direction::kToDevice);
  for (uint64_t at = range.address; at < range.end();) {
    const uint64_t end = std::min(store.copy_end(at), range.end());
    if (const CUdeviceptr peer = store.peer(at)) {
      CU_CHECK(cuMemcpyDtoDAsync, at, peer, end - at, stream);
    } else {
      CU_CHECK(cuMemcpyHtoDAsync, at, store.direct(at), end - at, stream);
    }
    queued(end);
    at = end;
  }
}

}  // namespace

void wait_for_copies(Device& device, Device::Direction direction) noexcept {
  try {
    if (driver().cuStreamSynchronize(device.copy_stream(direction)) != CUDA_SUCCESS) device.drain();
  } catch (...) {
  }
}

uint64_t staged_bytes(const std::vector<Range>& ranges) {
  return largest(cut(widened(ranges, kBackingUnit), kStagingBytes));
}

void restore_now(Device& device, BackupStore& store, const std::vector<Range>& ranges,
                 const StagingBuffer* buffer) try {
  CUstream stream = device.copy_stream(Device::Direction::kToDevice);
  for (const Range& range : ranges) {
    if (store.is_direct()) {
      queue_copies(device, store, range, [](uint64_t) {});
      continue;
    }
    uint64_t read_end = range.address / kBackingUnit * kBackingUnit;
    for (uint64_t at = range.address; at < range.end(); at = read_end) {
      const uint64_t begin = read_end;
      read_end = (range.end() + kBackingUnit - 1) / kBackingUnit * kBackingUnit;
      read_end = std::min(read_end, (begin / kStagingBytes + 1) * kStagingBytes);
      store.read(begin, buffer->data(), read_end - begin);
      CU_CHECK(cuMemcpyHtoDAsync, at, buffer->data() + (at - begin),
               std::min(read_end, range.end()) - at, stream);
      CU_CHECK(cuStreamSynchronize, stream);
    }
  }
  CU_CHECK(cuStreamSynchronize, stream);
} catch (...) {
  wait_for_copies(device, Device::Direction::kToDevice);
  throw;
}

// --- Save

Save::Save(Device& device, BackupStore& store, const std::vector<VaReservation>& spans,
           std::vector<Range> ranges, Progress& progress, StagingBuffer* reserve)
    : device_(device), store_(store), progress_(progress), reserve_(reserve) {
  std::vector<BackupStore::Room> rooms = store_.prepare(spans, ranges);
  try {
    for (const BackupStore::Room& room : rooms) {
      const std::vector<Range> joined = within(ranges, room.chunk);
      ranges_.insert(ranges_.end(), joined.begin(), joined.end());
    }
    const bool hashing = flag(Option::fingerprints) && Fingerprinter::available(device_);
    // Data read from a disk is verified against fingerprints; if the device cannot compute them,
    // the host does.
    if (hashing || store_.kind() == Backup::kDisk) pieces_ = cut(ranges_, kFingerprintBytes);
    if (!hashing) digests_.resize(pieces_.size());
    std::vector<Range> fresh;
    size_t piece = 0;
    for (const BackupStore::Room& room : rooms) {
      add_chunk(room, &piece);
      for (size_t i = chunks_.back().first_copy_chunk; room.fresh && i < copy_chunks_.size(); ++i) {
        fresh.push_back(copy_chunks_[i].bounds);
      }
    }
    if (hashing) {
      hasher_ = std::make_unique<Fingerprinter>(device_);
      hasher_->start(pieces_);
    }
    if (!fresh.empty()) {
      const size_t count = fresh.size();
      populating_ = std::make_unique<Workers>(
          count, [this, fresh = std::move(fresh)](size_t i) { store_.populate(fresh[i]); },
          populating_threads());
    }
  } catch (...) {
    for (const BackupStore::Room& room : rooms) {
      if (room.fresh) store_.abandon(room.chunk);
    }
    throw;
  }
  progress_.total_bytes += total(ranges_);
}

Save::~Save() {
  stop();
  if (finished_) return;
  for (const Chunk& chunk : chunks_) {
    if (chunk.room.fresh) store_.abandon(chunk.room.chunk);
  }
}

void Save::add_chunk(const BackupStore::Room& room, size_t* next_piece) {
  Chunk chunk{room, copy_chunks_.size(), 0};
  for (const Range& bounds : cut({room.chunk}, kCopyChunkBytes)) {
    CopyChunk copy_chunk{bounds, within(ranges_, bounds), *next_piece, 0};
    while (*next_piece < pieces_.size() && pieces_[*next_piece].address < bounds.end()) {
      ++*next_piece;
    }
    copy_chunk.piece_count = *next_piece - copy_chunk.first_piece;
    copy_chunks_.push_back(std::move(copy_chunk));
  }
  chunk.copy_chunk_count = copy_chunks_.size() - chunk.first_copy_chunk;
  chunks_.push_back(chunk);
}

// Prepares a new chunk for its first copy.
void Save::attach(const Chunk& chunk) {
  for (size_t i = 0; i < chunk.copy_chunk_count; ++i) populating_->wait_for(next_fresh_++);
  store_.attach(chunk.room.chunk);
}

// Returns the ranges of a copy chunk whose current contents are not in the store.
std::vector<Range> Save::changed(const CopyChunk& copy_chunk) {
  if (!hasher_) return copy_chunk.ranges;
  const std::vector<BackupStore::Kept> kept = store_.kept(copy_chunk.bounds);
  if (kept.empty()) return copy_chunk.ranges;
  std::vector<Range> different;
  auto known = kept.begin();
  for (size_t i = 0; i < copy_chunk.piece_count; ++i) {
    const Range& piece = pieces_[copy_chunk.first_piece + i];
    while (known != kept.end() && known->piece.address < piece.address) ++known;
    const bool same = known != kept.end() && known->piece.address == piece.address &&
                      known->piece.bytes == piece.bytes &&
                      known->digest == hasher_->wait(copy_chunk.first_piece + i);
    if (!same) {
      append(different, piece.address, piece.end());
      continue;
    }
    ++unchanged_.pieces;
    unchanged_.bytes += piece.bytes;
  }
  return different;
}

void Save::copy(const std::vector<Range>& ranges) {
  CUstream stream = device_.copy_stream(Device::Direction::kToHost);
  for (const Range& range : ranges) {
    store_.forget(range);
    if (const CUdeviceptr peer = store_.peer(range.address)) {
      CU_CHECK(cuMemcpyDtoDAsync, peer, range.address, range.bytes, stream);
    } else {
      CU_CHECK(cuMemcpyDtoHAsync, store_.direct(range.address), range.address, range.bytes, stream);
    }
    unrecorded_bytes_ += range.bytes;
  }
}

void Save::record_event(uint64_t end) {
  Event event = Event::create(device_);
  event.record(device_.copy_stream(Device::Direction::kToHost));
  events_.push_back({end, unrecorded_bytes_, std::move(event)});
  unrecorded_bytes_ = 0;
}

void Save::queue(uint64_t end) {
  for (; next_copy_chunk_ < copy_chunks_.size() &&
         copy_chunks_[next_copy_chunk_].bounds.address < end;
       ++next_copy_chunk_) {
    const CopyChunk& copy_chunk = copy_chunks_[next_copy_chunk_];
    if (next_chunk_ < chunks_.size() && chunks_[next_chunk_].first_copy_chunk == next_copy_chunk_) {
      const Chunk& chunk = chunks_[next_chunk_];
      if (chunk.room.fresh) attach(chunk);
      ++next_chunk_;
    }
    const std::vector<Range> different = changed(copy_chunk);
    const uint64_t bytes = total(different);
    progress_.total_bytes -= total(copy_chunk.ranges) - bytes;
    copied_bytes_ += bytes;
    if (!store_.is_direct()) {
      staged_.insert(staged_.end(), different.begin(), different.end());
      continue;
    }
    copy(different);
    const bool last = next_copy_chunk_ + 1 == copy_chunks_.size() ||
                      copy_chunks_[next_copy_chunk_ + 1].bounds.address >= end;
    if (last || unrecorded_bytes_ >= kEventBytes) record_event(copy_chunk.bounds.end());
  }
}

void Save::wait(uint64_t end) {
  queue(end);
  if (!store_.is_direct()) run_staged();
  if (hasher_) {  // the kernel reads memory that the caller may be about to unmap
    const auto behind = std::lower_bound(
        pieces_.begin(), pieces_.end(), end,
        [](const Range& piece, uint64_t address) { return piece.address < address; });
    if (behind != pieces_.begin()) hasher_->wait(static_cast<size_t>(behind - pieces_.begin()) - 1);
  }
  // Copy chunks are queued whole, so the events cover everything below `end` that was queued.
  for (; next_event_ < events_.size(); ++next_event_) {
    const bool enough = next_event_ > 0 && events_[next_event_ - 1].end >= end;
    if (enough) return;
    events_[next_event_].event.wait();
    progress_.done_bytes += events_[next_event_].bytes;
  }
}

void Save::run_staged() {
  queue(UINT64_MAX);
  const std::vector<Range> wanted = subtract(staged_, {});
  const std::vector<Range> pieces = cut(widened(wanted, kBackingUnit), kStagingBytes);
  staged_.clear();
  for (const Range& piece : pieces) store_.forget(piece);
  const auto copy_piece = [&](size_t i, StagingBuffer& buffer) {
    const Range& piece = pieces[i];
    CU_CHECK(cuMemcpyDtoHAsync, buffer.data(), piece.address, piece.bytes, buffer.stream());
    CU_CHECK(cuStreamSynchronize, buffer.stream());
    store_.write(piece.address, buffer.data(), piece.bytes);
    progress_.done_bytes += total(within(wanted, piece));
    if (hasher_) return;
    auto known = std::lower_bound(
        pieces_.begin(), pieces_.end(), piece.address,
        [](const Range& range, uint64_t address) { return range.address < address; });
    for (; known != pieces_.end() && known->address < piece.end(); ++known) {
      digests_[static_cast<size_t>(known - pieces_.begin())] =
          fingerprint_of(buffer.data() + (known->address - piece.address), known->bytes);
    }
  };
  stage(device_, pieces.size(), largest(pieces), copy_piece, reserve_);
  remember();  // a swap that fails later restores some of these bytes and checks them
}

void Save::remember() {
  if (remembered_) return;
  for (const Chunk& chunk : chunks_) {
    std::vector<BackupStore::Kept> kept;
    for (size_t at = chunk.first_copy_chunk; at < chunk.first_copy_chunk + chunk.copy_chunk_count;
         ++at) {
      const CopyChunk& copy_chunk = copy_chunks_[at];
      for (size_t i = copy_chunk.first_piece; i < copy_chunk.first_piece + copy_chunk.piece_count;
           ++i) {
        kept.push_back({pieces_[i], digest(i)});
      }
    }
    store_.remember(chunk.room.chunk, std::move(kept));
  }
  remembered_ = true;
}

uint64_t Save::finish() {
  wait(UINT64_MAX);
  remember();
  populating_.reset();
  hasher_.reset();
  events_.clear();
  finished_ = stopped_ = true;
  return copied_bytes_;
}

void Save::stop() noexcept {
  if (stopped_) return;
  populating_.reset();
  wait_for_copies(device_, Device::Direction::kToHost);
  hasher_.reset();
  events_.clear();
  stopped_ = true;
}

void Save::keep() noexcept {
  stop();
  for (size_t i = next_chunk_; i < chunks_.size(); ++i) {
    if (chunks_[i].room.fresh) store_.abandon(chunks_[i].room.chunk);
  }
  finished_ = true;
}

// --- Restore

Restore::Restore(Device& device, BackupStore& store, std::vector<Range> saved,
                 std::vector<Range> ranges, Progress& progress, StagingBuffer* reserve)
    : device_(device),
      store_(store),
      progress_(progress),
      reserve_(reserve),
      saved_(std::move(saved)),
      ranges_(std::move(ranges)) {
  progress_.total_bytes += total(ranges_);
}

Restore::~Restore() {
  if (queued_) wait_for_copies(device_, Device::Direction::kToDevice);
}

void Restore::queue(const Range& mapped, CopyEvents* events) {
  const std::vector<Range> parts = within(ranges_, mapped);
  uint64_t added_end = mapped.address;
  const auto add = [&](uint64_t end) {
    if (events && end > added_end) events->add({added_end, end - added_end});
    added_end = end;
  };
  if (!store_.is_direct()) {
    staged_.insert(staged_.end(), parts.begin(), parts.end());
    return;
  }
  for (const Range& part : parts) {
    queued_ = true;
    queue_copies(device_, store_, part, add);
    queued_bytes_ += part.bytes;
  }
  add(mapped.end());
}

void Restore::run_staged() {
  if (staged_.empty()) return;
  const std::vector<Range> wanted = subtract(staged_, {});
  staged_.clear();
  // Reads only the pieces that overlap the requested ranges, so that damage elsewhere does not fail
  // the resume, but reads each of them whole, so that its fingerprint can be checked.
  const std::vector<Range> read = intersect(saved_, widened(wanted, kFingerprintBytes));
  const std::vector<Range> pieces = cut(widened(read, kBackingUnit), kStagingBytes);
  const auto copy_piece = [&](size_t i, StagingBuffer& buffer) {
    const Range& piece = pieces[i];
    store_.read(piece.address, buffer.data(), piece.bytes);
    for (const Range& part : within(wanted, piece)) {
      CU_CHECK(cuMemcpyHtoDAsync, part.address, buffer.data() + (part.address - piece.address),
               part.bytes, buffer.stream());
      progress_.done_bytes += part.bytes;
    }
    CU_CHECK(cuStreamSynchronize, buffer.stream());
  };
  stage(device_, pieces.size(), largest(pieces), copy_piece, reserve_);
  copied_bytes_ += total(wanted);
}

uint64_t Restore::finish() {
  run_staged();
  if (queued_) {
    CU_CHECK(cuStreamSynchronize, device_.copy_stream(Device::Direction::kToDevice));
    queued_ = false;
    progress_.done_bytes += queued_bytes_;
    copied_bytes_ += queued_bytes_;
    queued_bytes_ = 0;
  }
  return copied_bytes_;
}

}  // namespace memsaver
