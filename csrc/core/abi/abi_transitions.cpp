// abi_transitions: ms_pause, ms_resume, and memsaver_transitions.h's functions. Only converts types
// and exceptions.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <optional>

#include "core/abi/marshal.h"
#include "core/driver/driver.h"
#include "core/memory/location.h"
#include "core/memory/reservation.h"
#include "core/platform/lifecycle.h"
#include "core/platform/workers.h"
#include "core/transition/transition.h"
#include "memsaver_transitions.h"

namespace {

using namespace memsaver;

Transition* unwrap(ms_transition* transition) {
  return unwrapped<Transition>(transition, "the transition");
}

Reservation* unwrap(ms_reservation* reservation) {
  return unwrapped<Reservation>(reservation, "the reservation");
}

ms_transition* wrap(std::unique_ptr<Transition> transition) {
  return reinterpret_cast<ms_transition*>(transition.release());
}

// Returns no deadline if `seconds` is negative or above 1e9, which the clock cannot represent.
Deadline deadline_after(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return std::nullopt;
  const std::chrono::duration<double> span(seconds);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(span);
}

TagSelection selection_of(const char* const* tags, size_t count) {
  if (count == MS_ALL_TAGS) return {{}, true};
  return {names_of(tags, count), false};
}

// Returns the count for ms_transition_begin, in which an empty list means no tags.
size_t or_all(size_t count) { return count == 0 ? MS_ALL_TAGS : count; }

// Lets the simulated driver, if it is open, name the tag when the host accesses paused memory.
void explain_host_faults() noexcept {
  const DriverTable* const driver = open_driver_table();
  if (driver && driver->explain_host_faults) driver->explain_host_faults(paused_tag);
}

// Runs and frees a transition that was begun; does nothing for null.
ms_status run_at_once(ms_status begun, ms_transition* transition, ms_change** rows,
                      size_t* row_count, ms_error* error) {
  if (begun != MS_OK) return begun;
  const ms_status done = ms_transition_run(transition, rows, row_count, error);
  ms_transition_free(transition);
  return done;
}

}  // namespace

extern "C" {

void ms_while_waiting(int (*look)(void* data), void* data) { while_waiting({look, data}); }

ms_status ms_reserve(const char* const* tags, size_t tag_count, ms_reservation** reservation,
                     ms_error* error) {
  return on_tags(error, [&] {
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
  return in_own_process(error, [&] {
    require_place(is_over);
    *is_over = unwrap(reservation)->wait(deadline_after(seconds)) ? 1 : 0;
  });
}

void ms_reservation_free(ms_reservation* reservation) {
  guarded(nullptr, [&] { delete reinterpret_cast<Reservation*>(reservation); });
}

ms_status ms_transition_begin(const char* const* out, size_t out_count, const char* const* into,
                              size_t into_count, int backup, const ms_range* unowned,
                              size_t unowned_count, const uint64_t* changes,
                              ms_transition** transition, ms_error* error) {
  return on_tags(error, [&] {
    require_place(transition);
    if (out_count > 0) explain_host_faults();
    *transition = wrap(Transition::begin({selection_of(out, out_count),
                                          selection_of(into, into_count), policy_of(backup),
                                          ranges_of(unowned, unowned_count), value_of(changes)}));
  });
}

ms_status ms_pause_begin(const char* const* tags, size_t tag_count, int backup,
                         const ms_range* unowned, size_t unowned_count, const uint64_t* changes,
                         ms_transition** transition, ms_error* error) {
  return ms_transition_begin(tags, or_all(tag_count), nullptr, 0, backup, unowned, unowned_count,
                             changes, transition, error);
}

ms_status ms_resume_begin(const char* const* tags, size_t tag_count, ms_transition** transition,
                          ms_error* error) {
  return ms_transition_begin(nullptr, 0, tags, or_all(tag_count), MS_BACKUP_DEFAULT, nullptr, 0,
                             nullptr, transition, error);
}

ms_status ms_swap_begin(const char* const* out, size_t out_count, const char* const* into,
                        size_t into_count, int backup, const ms_range* unowned,
                        size_t unowned_count, const uint64_t* changes, ms_transition** transition,
                        ms_error* error) {
  if (out_count == 0 || into_count == 0) {
    return guarded(error, [] {
      throw Error(Status::kInvalidArgument,
                  "a swap needs at least one tag to pause and one to resume; otherwise use "
                  "pause or resume");
    });
  }
  return ms_transition_begin(out, out_count, into, into_count, backup, unowned, unowned_count,
                             changes, transition, error);
}

ms_status ms_transition_run(ms_transition* transition, ms_change** rows, size_t* row_count,
                            ms_error* error) {
  return in_own_process(error, [&] {
    Transition* const begun = unwrap(transition);

    const auto make_rows = [&] {
      try {
        return make_list<ms_change>(rows ? begun->row_count() : 0);
      } catch (...) {
        begun->cancel();  // other threads may already wait for it
        throw;
      }
    };
    auto list = make_rows();
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

ms_status ms_transition_run_all(ms_transition* const* transitions, size_t count,
                                ms_run_result* results, ms_error* error) {
  return in_own_process(error, [&] {
    require_list(transitions, count, "transitions");
    require_list(results, count, "results");
    for (size_t i = 0; i < count; ++i) {
      unwrap(transitions[i]);
      if (std::find(transitions, transitions + i, transitions[i]) == transitions + i) continue;
      throw Error(Status::kInvalidArgument, "a transition is in the list twice");
    }
    // A drain after the first copies would also wait for those copies. If the drain fails here,
    // ms_transition_run repeats it.
    for (size_t i = 0; count > 1 && i < count; ++i) {
      guarded(nullptr, [&] { unwrap(transitions[i])->drain(); });
    }
    const auto run = [&](size_t i) {
      ms_run_result& of = results[i];
      of = {};
      of.status = ms_transition_run(transitions[i], &of.rows, &of.row_count, &of.error);
    };
    try {
      run_in_parallel(count, run);
    } catch (const std::bad_alloc&) {  // no memory for threads; none has run
      for (size_t i = 0; i < count; ++i) run(i);
    }
  });
}

ms_status ms_transition_hand_over(ms_transition* transition, ms_error* error) {
  return in_own_process(error, [&] { unwrap(transition)->hand_over(); });
}

ms_status ms_transition_set_caller(ms_transition* transition, const char* caller, ms_error* error) {
  return in_own_process(error,
                        [&] { unwrap(transition)->set_caller(text_of(caller, "the caller")); });
}

void ms_transition_progress(const ms_transition* transition, uint64_t* done_bytes,
                            uint64_t* total_bytes) {
  if (!transition) return;
  const Progress& progress = reinterpret_cast<const Transition*>(transition)->progress();
  if (done_bytes) *done_bytes = progress.done_bytes.load();
  if (total_bytes) *total_bytes = progress.total_bytes.load();
}

ms_status ms_transition_wait_stream(ms_transition* transition, void* stream, ms_error* error) {
  return in_own_process(error,
                        [&] { unwrap(transition)->wait_stream(static_cast<CUstream>(stream)); });
}

ms_status ms_transition_wait_ranges(ms_transition* transition, const ms_range* ranges,
                                    size_t range_count, void* const* stream, ms_error* error) {
  return in_own_process(error, [&] {
    const CUstream waiting = stream ? static_cast<CUstream>(*stream) : nullptr;
    unwrap(transition)->wait_ranges(ranges_of(ranges, range_count), stream ? &waiting : nullptr);
  });
}

void ms_transition_free(ms_transition* transition) {
  guarded(nullptr, [&] {
    if (!transition || forked()) return;  // a forked child has no thread that runs the transition
    delete reinterpret_cast<Transition*>(transition);
  });
}

ms_status ms_pause(const char* const* tags, size_t tag_count, int backup, const ms_range* unowned,
                   size_t unowned_count, const uint64_t* changes, ms_change** rows,
                   size_t* row_count, ms_error* error) {
  ms_transition* transition = nullptr;
  const ms_status begun =
      ms_pause_begin(tags, tag_count, backup, unowned, unowned_count, changes, &transition, error);
  return run_at_once(begun, transition, rows, row_count, error);
}

ms_status ms_resume(const char* const* tags, size_t tag_count, ms_change** rows, size_t* row_count,
                    ms_error* error) {
  ms_transition* transition = nullptr;
  const ms_status begun = ms_resume_begin(tags, tag_count, &transition, error);
  return run_at_once(begun, transition, rows, row_count, error);
}

}  // extern "C"
