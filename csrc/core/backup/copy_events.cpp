#include "core/backup/copy_events.h"

#include <algorithm>
#include <utility>

namespace memsaver {
namespace {

// The size of the largest copy (kCopyChunkBytes). It takes about 1 ms on the bus, which bounds the
// time that a stream waits for bytes it does not need; creating and recording an event takes a few
// microseconds.
constexpr uint64_t kMarkBytes = 64ull << 20;

uint64_t common_bytes(const Range& a, const Range& b) {
  const uint64_t begin = std::max(a.address, b.address), end = std::min(a.end(), b.end());
  return begin < end ? end - begin : 0;
}

}  // namespace

void CopyEvents::add(const Range& queued) {
  append(unmarked_, queued.address, queued.end());
  unmarked_bytes_ += queued.bytes;
  if (unmarked_bytes_ >= kMarkBytes) record();
}

void CopyEvents::close() {
  if (!unmarked_.empty() || marks_.empty()) record();
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
  for (const Mark& mark : marks_) {
    uint64_t bytes = 0;
    for (const Range& queued : mark.ranges) {
      for (const Range& range : ranges) bytes += common_bytes(queued, range);
    }
    if (bytes == 0) continue;
    *found_bytes += bytes;
    last = &mark.event;
  }
  return last;
}

}  // namespace memsaver
