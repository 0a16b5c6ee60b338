// abi: memsaver.h's functions. Translation only: C types to the core's, exceptions to status codes.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/allocation.h"
#include "core/backups.h"
#include "core/contents.h"
#include "core/driver.h"
#include "core/host_budget.h"
#include "core/lifecycle.h"
#include "core/location.h"
#include "core/log.h"
#include "core/marshal.h"
#include "core/options.h"
#include "core/pause.h"
#include "core/paused_touch.h"
#include "core/region.h"
#include "core/reservation.h"
#include "core/resume.h"
#include "core/staging.h"
#include "core/stats.h"
#include "core/stats_server.h"
#include "core/swap.h"
#include "core/timeline.h"
#include "memsaver.h"

namespace {

using namespace memsaver;

// Checks at the start of every call on tags. Makes the process's own tag known.
void require_tags() {
  require_not_forked();
  if (current_tag()) stats_server::start();  // the process's own tag has no region
}

Transition* unwrap(ms_transition* transition) {
  if (!transition) throw Error(Status::kInvalidArgument, "the transition is null");
  return reinterpret_cast<Transition*>(transition);
}

Reservation* unwrap(ms_reservation* reservation) {
  if (!reservation) throw Error(Status::kInvalidArgument, "the reservation is null");
  return reinterpret_cast<Reservation*>(reservation);
}

ms_transition* wrap(std::unique_ptr<Transition> transition) {
  return reinterpret_cast<ms_transition*>(transition.release());
}

// Returns no deadline for seconds below zero or above 1e9, which the clock cannot represent.
Deadline deadline_after(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return std::nullopt;
  const std::chrono::duration<double> span(seconds);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(span);
}

Device& device_of(int ordinal) { return Device::get(ordinal < 0 ? Device::current() : ordinal); }

}  // namespace

extern "C" {

const char* ms_version(void) { return MEMSAVER_VERSION; }

ms_status ms_driver_info(int* version, const char** library, int* simulated, ms_error* error) {
  return guarded(error, [&] {
    const DriverTable& table = driver();
    if (version) *version = table.version;
    if (library) *library = table.opened.c_str();
    if (simulated) *simulated = table.simulated ? 1 : 0;
  });
}

ms_status ms_device_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes,
                           ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const Device::Memory memory = device_of(device).memory();
    if (free_bytes) *free_bytes = memory.free_bytes;
    if (total_bytes) *total_bytes = memory.total_bytes;
  });
}

ms_status ms_device_bus_id(int device, char* text, size_t capacity, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    if (!text || capacity == 0) {
      throw Error(Status::kInvalidArgument, "there is no room for the answer");
    }
    copy_text(text, capacity, device_of(device).bus_id());
  });
}

ms_status ms_device_count(int* count, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    require_place(count);
    *count = Device::count();
  });
}

ms_status ms_configure(const char* name, const char* value, ms_error* error) {
  return guarded(error,
                 [&] { set_option(text_of(name, "the option"), text_of(value, "the value")); });
}

ms_status ms_option(const char* name, char* value, size_t capacity, ms_error* error) {
  return guarded(error, [&] {
    if (!value || capacity == 0)
      throw Error(Status::kInvalidArgument, "there is no room for the value");
    copy_text(value, capacity, option_text(text_of(name, "the option")));
  });
}

int ms_next_warning(char* text, size_t capacity) {
  int found = 0;
  guarded(nullptr, [&] {
    std::string warning;
    if (!text || capacity == 0 || forked() || !next_warning(&warning)) return;
    copy_text(text, capacity, warning);
    found = 1;
  });
  return found;
}

void ms_warn(const char* text) {
  if (forked() || !text) return;
  warn_of([&] { return std::string(text); });
}

void ms_list_free(void* list) { std::free(list); }

ms_status ms_region_enter(const char* tag, int backup, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    enter_region(text_of(tag, "the tag"), policy_of(backup));
    stats_server::start();
  });
}

ms_status ms_region_exit(ms_error* error) {
  return guarded(error, [&] {
    if (!forked()) exit_region();  // a child may leave what its parent entered
  });
}

ms_status ms_disable_enter(ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    enter_disabled();
  });
}

ms_status ms_region_limit(uint64_t devices, ms_error* error) {
  return guarded(error, [&] { limit_region(devices); });
}

const char* ms_region_tag(void) {
  const Tag* const tag = forked() ? nullptr : current_tag();
  return tag ? tag->name.c_str() : nullptr;
}

size_t ms_region_depth(void) { return region_depth(); }

ms_status ms_stream_bind(void* stream, const char* tag, int backup, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    bind_stream(stream, text_of(tag, "the tag"), policy_of(backup));
    stats_server::start();
  });
}

ms_status ms_stream_unbind(void* stream, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    unbind_stream(stream);
  });
}

ms_status ms_malloc(uint64_t bytes, int device, void** pointer, ms_error* error) {
  return guarded(error, [&] {
    require_place(pointer);
    *pointer = nullptr;
    require_not_forked();
    Tag* const tag = current_tag();
    if (!tag) throw Error(Status::kInvalidState, "the calling thread is in no region");
    if (bytes == 0) return;
    Device& on = device_of(device);
    if (!region_covers(on.ordinal())) {
      throw Error(Status::kInvalidState,
                  "the thread's region is not for device " + std::to_string(on.ordinal()));
    }
    *pointer = reinterpret_cast<void*>(allocate(*tag, on, bytes));
    on.adopt_thread();
    stats_server::start();  // the process's own tag has no region
  });
}

ms_status ms_malloc_any(uint64_t bytes, int device, void* stream, void** pointer, ms_error* error) {
  return guarded(error, [&] {
    require_place(pointer);
    *pointer = nullptr;
    require_not_forked();
    if (bytes == 0) return;
    Tag* const tag = current_tag(stream);
    Device& on = device_of(device);
    if (tag && region_covers(on.ordinal())) {
      *pointer = reinterpret_cast<void*>(allocate(*tag, on, bytes));
      stats_server::start();
      return;
    }
    DeviceScope scope(on);
    CUdeviceptr plain = 0;
    CU_CHECK(cuMemAlloc, &plain, bytes);
    *pointer = reinterpret_cast<void*>(plain);
  });
}

ms_status ms_free(void* pointer, ms_error* error) {
  return guarded(error, [&] {
    if (!pointer || forked()) return;  // a child shares the addresses, not the memory
    deallocate(reinterpret_cast<uint64_t>(pointer));
  });
}

ms_status ms_free_any(void* pointer, int device, ms_error* error) {
  if (!pointer || forked()) return MS_OK;
  if (ms_owns(pointer)) return ms_free(pointer, error);
  return guarded(error, [&] {
    DeviceScope scope(device_of(device));
    CU_CHECK(cuMemFree, reinterpret_cast<CUdeviceptr>(pointer));
  });
}

int ms_owns(const void* pointer) {
  return Registry::owner(reinterpret_cast<uint64_t>(pointer)) != nullptr;
}

int ms_wants(void) { return current_tag() != nullptr && !forked(); }

uint64_t ms_changes(void) { return Registry::instance().changes.load(); }

void ms_while_waiting(int (*look)(void* data), void* data) { while_waiting({look, data}); }

ms_status ms_reserve(const char* const* tags, size_t tag_count, ms_reservation** reservation,
                     ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    require_place(reservation);
    *reservation =
        reinterpret_cast<ms_reservation*>(Reservation::take(names_of(tags, tag_count)).release());
  });
}

ms_status ms_reservation_hand_over(ms_reservation* reservation, ms_error* error) {
  return guarded(error, [&] { unwrap(reservation)->hand_over(); });
}

ms_status ms_reservation_take_over(ms_reservation* reservation, ms_error* error) {
  return guarded(error, [&] { unwrap(reservation)->take_over(); });
}

ms_status ms_reservation_release(ms_reservation* reservation, ms_error* error) {
  return guarded(error, [&] {
    if (!forked()) unwrap(reservation)->release();
  });
}

ms_status ms_reservation_wait(ms_reservation* reservation, double seconds, int* is_over,
                              ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    require_place(is_over);
    *is_over = unwrap(reservation)->wait(deadline_after(seconds)) ? 1 : 0;
  });
}

void ms_reservation_free(ms_reservation* reservation) {
  guarded(nullptr, [&] { delete reinterpret_cast<Reservation*>(reservation); });
}

ms_status ms_pause_begin(const char* const* tags, size_t tag_count, int backup,
                         const ms_range* dead, size_t dead_count, const uint64_t* changes,
                         ms_transition** transition, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    require_place(transition);
    tell_of_paused_touches();
    *transition = wrap(begin_pause(names_of(tags, tag_count), policy_of(backup),
                                   ranges_of(dead, dead_count), value_of(changes)));
  });
}

ms_status ms_resume_begin(const char* const* tags, size_t tag_count, ms_transition** transition,
                          ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    require_place(transition);
    *transition = wrap(begin_resume(names_of(tags, tag_count)));
  });
}

ms_status ms_swap_begin(const char* const* out, size_t out_count, const char* const* into,
                        size_t into_count, int backup, const ms_range* dead, size_t dead_count,
                        const uint64_t* changes, ms_transition** transition, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    require_place(transition);
    *transition =
        wrap(begin_swap(names_of(out, out_count), names_of(into, into_count), policy_of(backup),
                        ranges_of(dead, dead_count), value_of(changes)));
  });
}

ms_status ms_transition_run(ms_transition* transition, ms_change** rows, size_t* row_count,
                            ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Transition* const begun = unwrap(transition);

    auto list = make_list<ms_change>(rows ? begun->row_count() : 0);
    const std::vector<Change> changes = begun->run();
    for (size_t i = 0; list && i < changes.size(); ++i) {
      const Change& c = changes[i];
      list.get()[i] = {c.tag->name.c_str(), c.device, c.changed ? 1 : 0, c.device_bytes,
                       c.copied_bytes};
    }
    if (row_count) *row_count = changes.size();
    if (rows) *rows = list.release();
  });
}

ms_status ms_transition_hand_over(ms_transition* transition, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    unwrap(transition)->hand_over();
  });
}

ms_status ms_transition_set_caller(ms_transition* transition, const char* caller, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    unwrap(transition)->set_caller(text_of(caller, "the caller"));
  });
}

void ms_transition_progress(const ms_transition* transition, uint64_t* done_bytes,
                            uint64_t* total_bytes) {
  if (!transition) return;
  const Progress& progress = reinterpret_cast<const Transition*>(transition)->progress();
  if (done_bytes) *done_bytes = progress.done_bytes.load();
  if (total_bytes) *total_bytes = progress.total_bytes.load();
}

ms_status ms_transition_wait_stream(ms_transition* transition, void* stream, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    unwrap(transition)->wait_stream(static_cast<CUstream>(stream));
  });
}

void ms_transition_free(ms_transition* transition) {
  guarded(nullptr, [&] {
    if (!transition || forked()) return;  // a child has no use for it, and no thread that runs it
    delete reinterpret_cast<Transition*>(transition);
  });
}

ms_status ms_pause(const char* const* tags, size_t tag_count, int backup, const ms_range* dead,
                   size_t dead_count, const uint64_t* changes, ms_change** rows, size_t* row_count,
                   ms_error* error) {
  ms_transition* transition = nullptr;
  const ms_status begun =
      ms_pause_begin(tags, tag_count, backup, dead, dead_count, changes, &transition, error);
  if (begun != MS_OK) return begun;
  const ms_status done = ms_transition_run(transition, rows, row_count, error);
  ms_transition_free(transition);
  return done;
}

ms_status ms_resume(const char* const* tags, size_t tag_count, ms_change** rows, size_t* row_count,
                    ms_error* error) {
  ms_transition* transition = nullptr;
  const ms_status begun = ms_resume_begin(tags, tag_count, &transition, error);
  if (begun != MS_OK) return begun;
  const ms_status done = ms_transition_run(transition, rows, row_count, error);
  ms_transition_free(transition);
  return done;
}

ms_status ms_refresh_peers(ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    share_with_active_devices();
  });
}

ms_status ms_tag_state(const char* tag, int* state, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    const std::string_view name = view_of(tag, "the tag");
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    require_place(state);
    *state = static_cast<int>(Registry::instance().known(name).state);
  });
}

ms_status ms_tag_pausable(const char* tag, int* pausable, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    const std::string_view name = view_of(tag, "the tag");
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    require_place(pausable);
    const Tag& found = Registry::instance().known(name);
    *pausable = found.state == State::kMapped && found.open_regions == 0 && !found.hold;
  });
}

ms_status ms_tag_backup(const char* tag, int* backup, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    const std::string_view name = view_of(tag, "the tag");
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    require_place(backup);
    *backup = static_cast<int>(Registry::instance().known(name).policy);
  });
}

ms_status ms_stats(ms_usage** rows, size_t* row_count, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    hand_out(usage(), [](const Usage& row) -> ms_usage { return row; }, rows, row_count);
  });
}

ms_status ms_timeline_start(size_t capacity, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    timeline::start(capacity);
    timeline::note_memory();
  });
}

ms_status ms_timeline_read(ms_event** rows, size_t* row_count, uint64_t* dropped, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const timeline::Recorded recorded = timeline::read();
    hand_out(recorded.records, event_row, rows, row_count);
    if (dropped) *dropped = recorded.dropped;
  });
}

ms_status ms_timeline_sample(ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    timeline::note_memory();
  });
}

ms_status ms_timeline_stop(ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    timeline::stop();
  });
}

ms_status ms_ranges(const char* tag, int device, ms_range** rows, size_t* row_count,
                    ms_error* error) {
  return guarded(error, [&] {
    require_tags();
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
    hand_out(ranges, [](const Range& r) { return ms_range{r.address, r.bytes}; }, rows, row_count);
  });
}

ms_status ms_locate(const void* pointer, ms_location* location, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    require_place(location);
    const Location found = locate(reinterpret_cast<uint64_t>(pointer));
    *location = ms_location{found.tag->name.c_str(),
                            found.device,
                            static_cast<int32_t>(found.state),
                            found.block.address,
                            found.block.bytes,
                            found.mark.at_seconds,
                            found.mark.thread,
                            ""};
    if (found.mark.caller) {
      copy_end_of_text(location->caller, sizeof(location->caller), *found.mark.caller);
    }
  });
}

ms_status ms_backup_view(uint64_t address, uint64_t bytes, int writable, void** host,
                         ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    require_place(host);
    *host = view_backup({address, bytes}, writable != 0);
  });
}

ms_status ms_retained_view(uint64_t address, uint64_t bytes, int writable, void** host,
                           ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    require_place(host);
    *host = view_retained({address, bytes}, writable != 0);
  });
}

ms_status ms_host_memory(uint64_t* held_bytes, uint64_t* available_bytes, ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const HostUsage usage = host_usage();
    if (held_bytes) *held_bytes = usage.held_bytes;
    if (available_bytes) *available_bytes = usage.available_bytes;
  });
}

ms_status ms_fingerprint(const ms_range* ranges, size_t count, ms_digest** rows, size_t* row_count,
                         ms_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    std::vector<Range> wanted;
    for (size_t i = 0; i < count; ++i) wanted.push_back({ranges[i].address, ranges[i].bytes});
    hand_out(
        fingerprints(wanted),
        [](const Digest& d) { return ms_digest{{d.lanes[0], d.lanes[1], d.lanes[2], d.lanes[3]}}; },
        rows, row_count);
  });
}

ms_status ms_trim(uint64_t* released_bytes, ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    const uint64_t released = trim_backups({}) + trim_staging() + Fingerprinter::trim();
    if (released_bytes) *released_bytes = released;
  });
}

ms_status ms_trim_tags(const char* const* tags, size_t tag_count, uint64_t* released_bytes,
                       ms_error* error) {
  return guarded(error, [&] {
    require_tags();
    const uint64_t released = trim_backups(names_of(tags, tag_count));
    if (released_bytes) *released_bytes = released;
  });
}

}  // extern "C"
