// abi_inspection: memsaver_inspection.h's functions. Only converts types and exceptions.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "core/abi/marshal.h"
#include "core/driver/deferred_release.h"
#include "core/memory/location.h"
#include "core/memory/timeline.h"
#include "core/observe/contents.h"
#include "core/observe/stats.h"
#include "memsaver_inspection.h"

namespace {

using namespace memsaver;

static_assert(MS_EVENT_BASELINE == static_cast<int>(Record::Kind::kBaseline) &&
              MS_EVENT_ALLOCATE == static_cast<int>(Record::Kind::kAllocate) &&
              MS_EVENT_FREE == static_cast<int>(Record::Kind::kFree) &&
              MS_EVENT_BEGIN == static_cast<int>(Record::Kind::kBegin) &&
              MS_EVENT_END == static_cast<int>(Record::Kind::kEnd) &&
              MS_EVENT_MEMORY == static_cast<int>(Record::Kind::kMemory));
static_assert(MS_NO_ACT == static_cast<int>(Act::kNone) &&
              MS_PAUSE == static_cast<int>(Act::kPause) &&
              MS_RESUME == static_cast<int>(Act::kResume) &&
              MS_SWAP == static_cast<int>(Act::kSwap));
static_assert(MS_DONE == static_cast<int>(Outcome::kDone) &&
              MS_FAILED == static_cast<int>(Outcome::kFailed) &&
              MS_GIVEN_UP == static_cast<int>(Outcome::kGivenUp));

ms_event event_row(const Record& record) {
  ms_event row{};
  row.time_seconds = static_cast<double>(record.time_ns) * 1e-9;
  row.kind = static_cast<int32_t>(record.kind);
  row.device = record.device;
  row.tag = record.tag ? record.tag->name.c_str() : nullptr;
  row.state = static_cast<int32_t>(record.state);
  row.act = static_cast<int32_t>(record.act);
  row.outcome = static_cast<int32_t>(record.outcome);
  row.thread = record.thread;
  row.allocated_bytes = record.allocated_bytes;
  row.resident_bytes = record.resident_bytes;
  row.transition = record.transition;
  row.device_bytes = record.device_bytes;
  row.copied_bytes = record.copied_bytes;
  row.free_bytes = record.free_bytes;
  row.total_bytes = record.total_bytes;
  if (record.caller) copy_end_of_text(row.caller, sizeof(row.caller), *record.caller);
  return row;
}

}  // namespace

extern "C" {

ms_status ms_stats(ms_usage** rows, size_t* row_count, ms_error* error) {
  return on_tags(error, [&] {
    return_list(usage(), [](const Usage& row) -> ms_usage { return row; }, rows, row_count);
  });
}

ms_status ms_host_memory(uint64_t* held_bytes, uint64_t* available_bytes, ms_error* error) {
  return in_own_process(error, [&] {
    const HostUsage usage = host_usage();
    if (held_bytes) *held_bytes = usage.held_bytes;
    if (available_bytes) *available_bytes = usage.available_bytes;
  });
}

ms_status ms_deferred_releases(uint64_t* objects, uint64_t* device_bytes, uint64_t* host_bytes,
                               ms_error* error) {
  return in_own_process(error, [&] {
    const Deferred deferred = deferred_releases();
    if (objects) *objects = deferred.objects;
    if (device_bytes) *device_bytes = deferred.device_bytes;
    if (host_bytes) *host_bytes = deferred.host_bytes;
  });
}

ms_status ms_timeline_start(size_t capacity, ms_error* error) {
  return on_tags(error, [&] {
    timeline::start(capacity);
    timeline::note_memory();
  });
}

ms_status ms_timeline_read(ms_event** rows, size_t* row_count, uint64_t* dropped, ms_error* error) {
  return in_own_process(error, [&] {
    const timeline::Recorded recorded = timeline::read();
    return_list(recorded.records, event_row, rows, row_count);
    if (dropped) *dropped = recorded.dropped;
  });
}

ms_status ms_timeline_sample(ms_error* error) {
  return in_own_process(error, [&] { timeline::note_memory(); });
}

ms_status ms_timeline_stop(ms_error* error) {
  return in_own_process(error, [&] { timeline::stop(); });
}

ms_status ms_ranges(const char* tag, int device, ms_range** rows, size_t* row_count,
                    ms_error* error) {
  return on_tags(error, [&] {
    const std::string name = text_of(tag, "the tag");
    std::vector<Range> ranges;
    {
      std::lock_guard<std::mutex> lock(Registry::instance().mutex);
      for (const auto& [ordinal, pool] : Registry::instance().known(name).pools) {
        if (device >= 0 && ordinal != device) continue;
        for (const Range& range : pool.heap.live()) ranges.push_back(range);
      }
    }
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.address < b.address; });
    return_list(
        ranges, [](const Range& r) { return ms_range{r.address, r.bytes}; }, rows, row_count);
  });
}

ms_status ms_locate(const void* pointer, ms_location* location, ms_error* error) {
  return in_own_process(error, [&] {
    require_place(location);
    const Location found = locate(reinterpret_cast<uint64_t>(pointer));
    *location = ms_location{found.tag->name.c_str(),
                            found.device,
                            static_cast<int32_t>(found.state),
                            found.block.address,
                            found.block.bytes,
                            found.transition.at_seconds,
                            found.transition.thread,
                            ""};
    if (found.transition.caller) {
      copy_end_of_text(location->caller, sizeof(location->caller), *found.transition.caller);
    }
  });
}

ms_status ms_fingerprint(const ms_range* ranges, size_t count, ms_digest** rows, size_t* row_count,
                         ms_error* error) {
  return in_own_process(error, [&] {
    require_list(ranges, count, "ranges");
    std::vector<Range> wanted;
    for (size_t i = 0; i < count; ++i) wanted.push_back({ranges[i].address, ranges[i].bytes});
    return_list(
        fingerprints(wanted),
        [](const Digest& d) { return ms_digest{{d.lanes[0], d.lanes[1], d.lanes[2], d.lanes[3]}}; },
        rows, row_count);
  });
}

}  // extern "C"
