#include "core/file_medium.h"

#include "core/status.h"

namespace memsaver {

void FileMedium::cover(const std::vector<VaReservation>& spans) {
  for (const VaReservation& span : spans) {
    if (starts_.try_emplace(span.address(), end_).second) end_ += span.bytes();
  }
}

void FileMedium::populate(const Range& part) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    populated_.insert(part.address);  // also where only some of it gets its blocks
  }
  file_.reserve(place(part.address), part.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  unreturned_ = subtract(std::move(unreturned_), {part});
}

void FileMedium::drop(const Range& cell) {
  const bool punched = file_.punch(place(cell.address), cell.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto first = populated_.lower_bound(cell.address);
  const auto last = populated_.lower_bound(cell.end());
  const bool held = first != last;
  populated_.erase(first, last);
  if (populated_.empty()) {
    if (!punched || !unreturned_.empty()) file_.clear();
    unreturned_.clear();
  } else if (held && !punched) {
    for (const Range& part : subtract({cell}, unreturned_)) unreturned_.push_back(part);
  }
}

uint64_t FileMedium::unreturned_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total(unreturned_);
}

uint64_t FileMedium::place(uint64_t address) const {
  const auto after = starts_.upper_bound(address);
  if (after == starts_.begin()) {
    throw Error(Status::kInternal,
                "no place in the file for the backup of address " + std::to_string(address));
  }
  const auto& [start, offset] = *std::prev(after);
  return offset + (address - start);
}

}  // namespace memsaver
