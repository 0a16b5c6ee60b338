#include "core/memory/timeline.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

#include "core/platform/status.h"

namespace memsaver {
namespace timeline {

std::atomic<bool> on{false};

namespace {

constexpr size_t kMostRecords = 1u << 24;

int64_t now_ns() noexcept {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

using Place = std::pair<const Tag*, int32_t>;

// Requires the registry's lock.
struct Ring {
  std::vector<Record> places;  // used and unused records
  size_t next = 0;             // the index for the next record
  uint64_t written = 0;
  std::map<Place, Record> baselines;  // by tag and device: the state before the ring's records

  uint64_t dropped() const { return written > places.size() ? written - places.size() : 0; }
  void add(Record record) noexcept;
  Recorded in_order() const;
};

Ring& ring() {
  static Ring* const made = new Ring;  // never destroyed: threads may write at exit
  return *made;
}

void Ring::add(Record record) noexcept {
  Record& place = places[next];
  if (written >= places.size() && place.tag) {
    try {
      Record& baseline = baselines[{place.tag, place.device}];
      baseline.time_ns = place.time_ns;
      baseline.tag = place.tag;
      baseline.device = place.device;
      baseline.state = place.state;
      baseline.allocated_bytes = place.allocated_bytes;
      baseline.resident_bytes = place.resident_bytes;
    } catch (...) {
      // Without memory for a baseline, the tag's line starts with its first record.
    }
  }
  place = std::move(record);
  next = next + 1 == places.size() ? 0 : next + 1;
  ++written;
}

Recorded Ring::in_order() const {
  Recorded recorded;
  const size_t used = static_cast<size_t>(std::min<uint64_t>(written, places.size()));
  recorded.records.reserve(baselines.size() + used);
  for (const auto& [place, record] : baselines) recorded.records.push_back(record);
  const size_t first = used < places.size() ? 0 : next;
  for (size_t i = 0; i < used; ++i) {
    recorded.records.push_back(places[(first + i) % places.size()]);
  }
  recorded.dropped = dropped();
  return recorded;
}

Record of_pool(Record::Kind kind, const Pool& pool) noexcept {
  Record record;
  record.time_ns = now_ns();
  record.kind = kind;
  record.tag = &pool.tag;
  record.device = pool.heap.device().ordinal();
  record.state = pool.tag.state;
  record.allocated_bytes = pool.heap.allocated_bytes();
  record.resident_bytes = pool.resident_bytes();
  return record;
}

Record of_empty_tag(Record::Kind kind, const Tag& tag) noexcept {
  Record record;
  record.time_ns = now_ns();
  record.kind = kind;
  record.tag = &tag;
  record.state = tag.state;
  return record;
}

template <typename Complete>
void write_each(Record::Kind kind, const Tag& tag, Complete complete) noexcept {
  if (tag.pools.empty()) {
    Record record = of_empty_tag(kind, tag);
    complete(record, nullptr);
    ring().add(std::move(record));
  }
  for (const auto& [ordinal, pool] : tag.pools) {
    Record record = of_pool(kind, pool);
    complete(record, &pool);
    ring().add(std::move(record));
  }
}

void require_recording() {
  if (recording()) return;
  throw Error(Status::kInvalidState, "no timeline is being recorded: start one first");
}

}  // namespace

void write(Record::Kind kind, const Pool& pool) noexcept { ring().add(of_pool(kind, pool)); }

void note_begin(const Tag& tag, Act act, uint64_t transition,
                const TransitionRecord& origin) noexcept {
  if (!recording()) return;
  write_each(Record::Kind::kBegin, tag, [&](Record& record, const Pool*) {
    record.act = act;
    record.transition = transition;
    record.thread = origin.thread;
  });
}

void note_end(const Tag& tag, Act act, uint64_t transition, const TransitionRecord& origin,
              Outcome outcome, bool pausing) noexcept {
  if (!recording()) return;
  write_each(Record::Kind::kEnd, tag, [&](Record& record, const Pool* pool) {
    record.act = act;
    record.transition = transition;
    record.thread = origin.thread;
    record.outcome = outcome;
    record.caller = origin.caller;
    if (!pool || outcome != Outcome::kDone) return;
    const TransitionCounters& counters = pausing ? pool->paused : pool->resumed;
    record.device_bytes = counters.last_device_bytes;
    record.copied_bytes = counters.last_copied_bytes;
  });
}

void note_memory() noexcept {
  if (!recording()) return;
  try {
    std::mutex& mutex = Registry::instance().mutex;
    std::set<const Device*> devices;
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (const auto& tag : Registry::instance().tags()) {
        for (const auto& [ordinal, pool] : tag->pools) devices.insert(&pool.heap.device());
      }
    }
    for (const Device* device : devices) {
      Record record;
      try {
        const Device::Memory memory = device->memory();
        record.free_bytes = memory.free_bytes;
        record.total_bytes = memory.total_bytes;
      } catch (...) {
        continue;  // with a lost context, the driver reports no memory
      }
      record.kind = Record::Kind::kMemory;
      record.device = device->ordinal();
      std::lock_guard<std::mutex> lock(mutex);
      if (!recording()) return;
      record.time_ns = now_ns();  // under the lock, so that records are in chronological order
      ring().add(std::move(record));
    }
  } catch (...) {
    // Out of host memory: omit this sample.
  }
}

void start(size_t capacity) {
  if (capacity == 0 || capacity > kMostRecords) {
    throw Error(Status::kInvalidArgument, "a timeline has room for 1 to " +
                                              std::to_string(kMostRecords) + " events, not " +
                                              std::to_string(capacity));
  }
  Ring fresh;
  fresh.places.resize(capacity);
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (recording()) {
    throw Error(Status::kInvalidState,
                "a timeline is already being recorded: a process records one at a time");
  }
  for (const auto& tag : registry.tags()) {
    for (const auto& [ordinal, pool] : tag->pools) {
      const Place place{tag.get(), ordinal};
      fresh.baselines.emplace(place, of_pool(Record::Kind::kBaseline, pool));
    }
  }
  std::swap(ring(), fresh);
  on.store(true, std::memory_order_relaxed);
}

Recorded read() {
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  require_recording();
  return ring().in_order();
}

void stop() {
  Ring last;  // outlives the lock
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  require_recording();
  on.store(false, std::memory_order_relaxed);
  std::swap(ring(), last);
}

}  // namespace timeline
}  // namespace memsaver
