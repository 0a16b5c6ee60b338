// copy_events: events recorded between the copies that a resume queues on one device. With these
// events, a stream can wait for the contents of some addresses rather than all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/driver/device.h"
#include "core/driver/handles.h"
#include "core/platform/range.h"

namespace memsaver {

// Owns the events. One thread adds events inside a DeviceScope; after close(), the object is
// constant, and any thread may read it.
class CopyEvents {
 public:
  explicit CopyEvents(Device& device) : device_(&device) {}

  // Records that all copies and fills into a range are queued, and records an event after every
  // kMarkBytes bytes. Each address may be added at most once, by add() or add_without_work().
  // Throws kDriverFailed.
  void add(const Range& queued);
  // Records a range that needs no event because no copy or fill into the range is queued.
  void add_without_work(const Range& range);
  // Records an event after the ranges that were added since the previous event, if any. Throws
  // kDriverFailed.
  void close();

  // Returns the event that follows the last work queued for `ranges`, or null if no work is queued
  // for them. Increases `*found_bytes` by the bytes of `ranges` that were added.
  const Event* last_in(const std::vector<Range>& ranges, uint64_t* found_bytes) const;
  // Returns the event that follows all queued work, or null if no work is queued.
  const Event* last() const { return marks_.empty() ? nullptr : &marks_.back().event; }

 private:
  struct Mark {
    std::vector<Range> ranges;  // the ranges after the previous event, in the order of the work
    Event event;
  };

  void record();

  Device* device_;
  std::vector<Mark> marks_;
  std::vector<Range> unmarked_;
  std::vector<Range> without_work_;
  uint64_t unmarked_bytes_ = 0;
};

}  // namespace memsaver
