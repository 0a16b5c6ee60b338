#include "core/backup/file_backing_store.h"

#include "core/platform/status.h"

namespace memsaver {

void FileBackingStore::cover(const std::vector<VaReservation>& spans) {
  for (const VaReservation& span : spans) {
    if (starts_.try_emplace(span.address(), end_).second) end_ += span.bytes();
  }
}

void FileBackingStore::populate(const Range& part) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    populated_.insert(part.address);  // first: a failed reserve() may have reserved some blocks
  }
  file_.reserve(place(part.address), part.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  unreturned_ = subtract(std::move(unreturned_), {part});
}

void FileBackingStore::drop(const Range& chunk) {
  const bool punched = file_.punch(place(chunk.address), chunk.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto first = populated_.lower_bound(chunk.address);
  const auto last = populated_.lower_bound(chunk.end());
  const bool held = first != last;
  populated_.erase(first, last);
  if (populated_.empty()) {
    if (!punched || !unreturned_.empty()) file_.clear();
    unreturned_.clear();
  } else if (held && !punched) {
    for (const Range& part : subtract({chunk}, unreturned_)) unreturned_.push_back(part);
  }
}

uint64_t FileBackingStore::unreturned_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total(unreturned_);
}

uint64_t FileBackingStore::place(uint64_t address) const {
  const auto after = starts_.upper_bound(address);
  if (after == starts_.begin()) {
    throw Error(Status::kInternal,
                "no place in the file for the backup of address " + std::to_string(address));
  }
  const auto& [start, offset] = *std::prev(after);
  return offset + (address - start);
}

}  // namespace memsaver
