#include "core/transfer.h"

#include <algorithm>

#include "core/driver.h"
#include "core/options.h"
#include "core/status.h"

namespace memsaver {
namespace {

// Between two marks: small enough to follow the progress and to hand pages over early.
constexpr uint64_t kMarkBytes = 256ull << 20;

// Threads that fill fresh cells with pages: some CPUs are left to pin them and to do the copies (16
// CPUs: 46 GB/s with 10 threads, 35 with 16).
unsigned populating_threads() {
  const unsigned cpus = worker_count();
  return cpus - std::max(cpus * 3 / 8, std::min(cpus - 1, 1u));
}

uint64_t largest(const std::vector<Range>& pieces) {
  uint64_t bytes = 0;
  for (const Range& piece : pieces) bytes = std::max(bytes, piece.bytes);
  return bytes;
}

}  // namespace

void settle(Device& device, Device::Direction direction) noexcept {
  try {
    if (driver().cuStreamSynchronize(device.copy_stream(direction)) != CUDA_SUCCESS) device.drain();
  } catch (...) {
  }
}

uint64_t staged_bytes(const std::vector<Range>& ranges) {
  return largest(cut(widened(ranges, kMediumUnit), kStagingBytes));
}

// --- Save

Save::Save(Device& device, BackupStore& store, const std::vector<VaReservation>& spans,
           std::vector<Range> ranges, Progress& progress, StagingBuffer* reserve)
    : device_(device), store_(store), progress_(progress), reserve_(reserve) {
  std::vector<BackupStore::Room> rooms = store_.prepare(spans, ranges);
  try {
    for (const BackupStore::Room& room : rooms) {
      const std::vector<Range> joined = subtract(within(ranges, room.cell), {});
      ranges_.insert(ranges_.end(), joined.begin(), joined.end());
    }
    const bool hashing = flag(Option::fingerprints) && Fingerprinter::available(device_);
    // What a disk gives back is checked, so there the host hashes where the device does not.
    if (hashing || store_.kind() == Backup::kDisk) pieces_ = cut(ranges_, kFingerprintBytes);
    if (!hashing) digests_.resize(pieces_.size());
    std::vector<Range> fresh;
    size_t piece = 0;
    for (const BackupStore::Room& room : rooms) {
      add_cell(room, &piece);
      for (size_t i = cells_.back().first_strip; room.fresh && i < strips_.size(); ++i) {
        fresh.push_back(strips_[i].bounds);
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
      if (room.fresh) store_.abandon(room.cell);
    }
    throw;
  }
  progress_.total_bytes += total(ranges_);
}

Save::~Save() {
  stop();
  if (finished_) return;
  for (const Cell& cell : cells_) {
    if (cell.room.fresh) store_.abandon(cell.room.cell);
  }
}

void Save::add_cell(const BackupStore::Room& room, size_t* next_piece) {
  Cell cell{room, strips_.size(), 0};
  for (const Range& bounds : cut({room.cell}, kStripBytes)) {
    Strip strip{bounds, within(ranges_, bounds), *next_piece, 0};
    while (*next_piece < pieces_.size() && pieces_[*next_piece].address < bounds.end()) {
      ++*next_piece;
    }
    strip.piece_count = *next_piece - strip.first_piece;
    strips_.push_back(std::move(strip));
  }
  cell.strip_count = strips_.size() - cell.first_strip;
  cells_.push_back(cell);
}

// Makes a fresh cell ready for its first copy.
void Save::attach(const Cell& cell) {
  for (size_t i = 0; i < cell.strip_count; ++i) populating_->wait_for(next_fresh_++);
  store_.attach(cell.room.cell);
}

// The ranges of a strip that are not in the store as they are.
std::vector<Range> Save::changed(const Strip& strip) {
  if (!hasher_) return strip.ranges;
  const std::vector<BackupStore::Kept> kept = store_.kept(strip.bounds);
  if (kept.empty()) return strip.ranges;
  std::vector<Range> different;
  auto known = kept.begin();
  for (size_t i = 0; i < strip.piece_count; ++i) {
    const Range& piece = pieces_[strip.first_piece + i];
    while (known != kept.end() && known->piece.address < piece.address) ++known;
    const bool same = known != kept.end() && known->piece.address == piece.address &&
                      known->piece.bytes == piece.bytes &&
                      known->digest == hasher_->wait(strip.first_piece + i);
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
    CU_CHECK(cuMemcpyDtoHAsync, store_.direct(range.address), range.address, range.bytes, stream);
    marked_bytes_ += range.bytes;
  }
}

void Save::mark(uint64_t end) {
  Event event = Event::create(device_);
  event.record(device_.copy_stream(Device::Direction::kToHost));
  marks_.push_back({end, marked_bytes_, std::move(event)});
  marked_bytes_ = 0;
}

void Save::queue(uint64_t end) {
  for (; next_strip_ < strips_.size() && strips_[next_strip_].bounds.address < end; ++next_strip_) {
    const Strip& strip = strips_[next_strip_];
    if (next_cell_ < cells_.size() && cells_[next_cell_].first_strip == next_strip_) {
      const Cell& cell = cells_[next_cell_];
      if (cell.room.fresh) attach(cell);
      ++next_cell_;
    }
    const std::vector<Range> different = changed(strip);
    const uint64_t bytes = total(different);
    progress_.total_bytes -= total(strip.ranges) - bytes;
    copied_bytes_ += bytes;
    if (!store_.is_direct()) {
      staged_.insert(staged_.end(), different.begin(), different.end());
      continue;
    }
    copy(different);
    const bool last =
        next_strip_ + 1 == strips_.size() || strips_[next_strip_ + 1].bounds.address >= end;
    if (last || marked_bytes_ >= kMarkBytes) mark(strip.bounds.end());
  }
}

void Save::wait(uint64_t end) {
  queue(end);
  if (!store_.is_direct()) run_staged();
  if (hasher_) {  // it reads what the caller may be about to unmap
    const auto behind = std::lower_bound(
        pieces_.begin(), pieces_.end(), end,
        [](const Range& piece, uint64_t address) { return piece.address < address; });
    if (behind != pieces_.begin()) hasher_->wait(static_cast<size_t>(behind - pieces_.begin()) - 1);
  }
  // A strip is queued whole, so the marks reach `end` where anything below it was queued.
  for (; next_mark_ < marks_.size(); ++next_mark_) {
    const bool enough = next_mark_ > 0 && marks_[next_mark_ - 1].end >= end;
    if (enough) return;
    marks_[next_mark_].event.wait();
    progress_.done_bytes += marks_[next_mark_].bytes;
  }
}

void Save::run_staged() {
  queue(UINT64_MAX);
  const std::vector<Range> wanted = subtract(staged_, {});
  const std::vector<Range> pieces = cut(widened(wanted, kMediumUnit), kStagingBytes);
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
  for (const Cell& cell : cells_) {
    std::vector<BackupStore::Kept> kept;
    for (size_t at = cell.first_strip; at < cell.first_strip + cell.strip_count; ++at) {
      const Strip& strip = strips_[at];
      for (size_t i = strip.first_piece; i < strip.first_piece + strip.piece_count; ++i) {
        kept.push_back({pieces_[i], digest(i)});
      }
    }
    store_.remember(cell.room.cell, std::move(kept));
  }
  remembered_ = true;
}

uint64_t Save::finish() {
  wait(UINT64_MAX);
  remember();
  populating_.reset();
  hasher_.reset();
  marks_.clear();
  finished_ = stopped_ = true;
  return copied_bytes_;
}

void Save::stop() noexcept {
  if (stopped_) return;
  populating_.reset();
  settle(device_, Device::Direction::kToHost);
  hasher_.reset();
  marks_.clear();
  stopped_ = true;
}

void Save::keep() noexcept {
  stop();
  for (size_t i = next_cell_; i < cells_.size(); ++i) {
    if (cells_[i].room.fresh) store_.abandon(cells_[i].room.cell);
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
  if (queued_) settle(device_, Device::Direction::kToDevice);
}

void Restore::queue(const Range& mapped) {
  const std::vector<Range> parts = within(ranges_, mapped);
  if (!store_.is_direct()) {
    staged_.insert(staged_.end(), parts.begin(), parts.end());
    return;
  }
  CUstream stream = device_.copy_stream(Device::Direction::kToDevice);
  for (const Range& part : store_.cut_for_copies(parts)) {
    queued_ = true;
    CU_CHECK(cuMemcpyHtoDAsync, part.address, store_.direct(part.address), part.bytes, stream);
    queued_bytes_ += part.bytes;
  }
}

void Restore::run_staged() {
  if (staged_.empty()) return;
  const std::vector<Range> wanted = subtract(staged_, {});
  staged_.clear();
  // Only pieces that overlap the wanted ranges, and each as a whole, so that its fingerprint can be
  // checked: damage elsewhere must not fail the resume.
  const std::vector<Range> read = intersect(saved_, widened(wanted, kFingerprintBytes));
  const std::vector<Range> pieces = cut(widened(read, kMediumUnit), kStagingBytes);
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
