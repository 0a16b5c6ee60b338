#include "core/backup/copy_events.h"

#include <algorithm>
#include <utility>

namespace memsaver {
namespace {

// The size of the largest copy (kCopyChunkBytes). Such a copy takes about 1 ms on the bus, which
// bounds the time that a stream waits for bytes it does not need; creating and recording an event
// takes a few microseconds.
constexpr uint64_t kMarkBytes = 64ull << 20;

// Returns the bytes that two lists of ranges have in common.
uint64_t common_bytes(const std::vector<Range>& some, const std::vector<Range>& others) {
  uint64_t bytes = 0;
  for (const Range& a : some) {
    for (const Range& b : others) {
      const uint64_t begin = std::max(a.address, b.address), end = std::min(a.end(), b.end());
      if (begin < end) bytes += end - begin;
    }
  }
  return bytes;
}

}  // namespace

void CopyEvents::add(const Range& queued) {
  append(unmarked_, queued.address, queued.end());
  unmarked_bytes_ += queued.bytes;
  if (unmarked_bytes_ >= kMarkBytes) record();
}

void CopyEvents::add_without_work(const Range& range) {
  append(without_work_, range.address, range.end());
}

void CopyEvents::close() {
  if (!unmarked_.empty()) record();
}

void CopyEvents::record() {
  Mark mark{std::move(unmarked_), Event::create(*device_)};
  unmarked_.clear();
  unmarked_bytes_ = 0;
  mark.event.record(device_->copy_stream(Device::Direction::kToDevice));
  marks_.push_back(std::move(mark));
}

const Event* CopyEvents::last_in(const std::vector<Range>& ranges, uint64_t* found_bytes) const {
  const Event* last = nullptr;
  *found_bytes += common_bytes(without_work_, ranges);
  for (const Mark& mark : marks_) {
    const uint64_t bytes = common_bytes(mark.ranges, ranges);
    if (bytes == 0) continue;
    *found_bytes += bytes;
    last = &mark.event;
  }
  return last;
}

}  // namespace memsaver
