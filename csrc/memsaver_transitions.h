/* memsaver_transitions.h: reservations of tags, and transitions with handles: pauses, resumes and
 * swaps that a program begins, runs and waits for in separate calls, on any thread. ms_pause and
 * ms_resume in memsaver.h begin, run and free a pause or a resume in one call. The contract in
 * memsaver.h, including its section "Waiting for a tag", applies to every function.
 *
 * These functions do not call the callbacks that Python code registers with on_pause and on_resume.
 */
#ifndef MEMSAVER_TRANSITIONS_H_
#define MEMSAVER_TRANSITIONS_H_

#include "memsaver.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- reservations */

/* A reservation: the exclusive right to begin transitions of a set of tags, for work that must run
 * together with a transition. Only the owning thread can begin transitions of the tags or reserve
 * the tags again (reservations nest). Other threads that try to do so wait; they can still allocate
 * memory for the tags. */
typedef struct ms_reservation ms_reservation;

/* Reserves `tags` for the calling thread; an empty list means every tag. Waits until no other
 * thread owns a reservation or a transition of any of these tags.
 * Errors: MS_UNKNOWN_TAG if a tag does not exist; MS_INVALID_STATE if the wait would deadlock. */
MS_API ms_status ms_reserve(const char* const* tags, size_t tag_count, ms_reservation** reservation,
                            ms_error* error);

/* Transfers the reservation to another thread, which must call ms_reservation_take_over.
 * Transitions of the reserved tags that the calling thread has begun are also transferred.
 * Afterwards, calls on the calling thread wait like calls on any other thread. Does nothing if
 * another thread has already taken over the reservation. */
MS_API ms_status ms_reservation_hand_over(ms_reservation* reservation, ms_error* error);
MS_API ms_status ms_reservation_take_over(ms_reservation* reservation, ms_error* error);

/* Releases the reservation; the calling thread need not own it. Further calls do nothing. */
MS_API ms_status ms_reservation_release(ms_reservation* reservation, ms_error* error);

/* Waits until the reservation is released, for at most `seconds` seconds (negative: without a
 * limit). Sets `is_over` to 1 if the reservation was released, otherwise to 0.
 * Errors: MS_INVALID_STATE if this thread owns the reservation, or the reservation's owner is
 * waiting for this thread.
 */
MS_API ms_status ms_reservation_wait(ms_reservation* reservation, double seconds, int* is_over,
                                     ms_error* error);

/* Releases and frees a reservation that no other thread is using. Accepts NULL. */
MS_API void ms_reservation_free(ms_reservation* reservation);

/* --- transitions */

/* A transition: a pause, a resume, or both. The thread that begins a transition owns it until
 * ms_transition_hand_over is called; after that, the thread that runs the transition owns it. */
typedef struct ms_transition ms_transition;

/* The value of `out_count` or `into_count` that selects every tag. */
#define MS_ALL_TAGS ((size_t)-1)

/* Begins a transition, which releases the device memory of the tags in `out` and maps device memory
 * for the tags in `into` at the same addresses as before, on every device. The transition succeeds
 * for all of these tags or for none. A transition without `into` is a pause, and a transition
 * without `out` is a resume. A transition with both is a swap, which copies in both directions at
 * the same time and remaps pages from `out` to `into` without releasing them. Tags of `out` that
 * are already paused and tags of `into` that are already mapped are not changed.
 *
 * After this call, the transition owns the tags, and conflicting calls wait (see "Waiting for a
 * tag"), so the transition must be run or freed.
 *
 * `backup`, `unowned` and `changes` apply to the tags in `out`, as in ms_pause. If `out` is empty
 * and `backup` is MS_BACKUP_NONE, the transition restores nothing: all bytes read as if the pause
 * had not saved them, except the contents of retained pages (see ms_transition_run). After a
 * resume, bytes that were not saved read as zero, or as 0xFF with option `poison`.
 *
 * Errors: MS_UNKNOWN_TAG if a tag does not exist; MS_INVALID_STATE if a region of a tag of `out` is
 * open on a thread, or the wait would deadlock; MS_INVALID_ARGUMENT if a tag is in both lists, or
 * both are empty; MS_TAG_SHARED if other processes map memory of a tag of `out` (see
 * memsaver_sharing.h). */
MS_API ms_status ms_transition_begin(const char* const* out, size_t out_count,
                                     const char* const* into, size_t into_count, int backup,
                                     const ms_range* unowned, size_t unowned_count,
                                     const uint64_t* changes, ms_transition** transition,
                                     ms_error* error);

/* Begins a pause, like ms_transition_begin without `into`. An empty list of tags selects every tag.
 */
MS_API ms_status ms_pause_begin(const char* const* tags, size_t tag_count, int backup,
                                const ms_range* unowned, size_t unowned_count,
                                const uint64_t* changes, ms_transition** transition,
                                ms_error* error);

/* Begins a resume, like ms_transition_begin without `out`. An empty list of tags selects every tag.
 */
MS_API ms_status ms_resume_begin(const char* const* tags, size_t tag_count,
                                 ms_transition** transition, ms_error* error);

/* Begins a swap, like ms_transition_begin with both lists.
 * Errors: the errors of ms_transition_begin; also MS_INVALID_ARGUMENT if either list is empty. */
MS_API ms_status ms_swap_begin(const char* const* out, size_t out_count, const char* const* into,
                               size_t into_count, int backup, const ms_range* unowned,
                               size_t unowned_count, const uint64_t* changes,
                               ms_transition** transition, ms_error* error);

/* Runs the transition and releases its tags. A transition can be run only once. On success, `rows`
 * (which may be NULL) receives one row for each tag and device, with the rows of `out` first. If
 * tags in `out` have memory, waits for all work submitted earlier to the devices.
 *
 * Errors: MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY, MS_BACKUP_FAILED or MS_DRIVER_FAILED if a
 * step fails; MS_INVALID_STATE if the transition was run before.
 *
 * After an error, every tag in `out` is mapped and has its contents, and every tag in `into` is
 * paused, has its backup and uses no device memory. The caller may begin the same transition again.
 * This guarantee has two exceptions:
 *   - If `into` is not empty, the contents of tags in `out` without a backup may be lost.
 *   - If the rollback also fails, the tags in `out` are paused, and their contents are in their
 *     backups or in retained pages. The error message reports this case, and a resume restores the
 *     contents. */
MS_API ms_status ms_transition_run(ms_transition* transition, ms_change** rows, size_t* row_count,
                                   ms_error* error);

/* The result of one transition of ms_transition_run_all. */
typedef struct ms_run_result {
  int32_t status;   /* the ms_status that ms_transition_run would return */
  size_t row_count; /* the length of `rows`; 0 if the transition failed */
  ms_change* rows;  /* the caller frees the list with ms_list_free */
  ms_error error;   /* set if `status` is not MS_OK */
} ms_run_result;

/* Runs `count` transitions at the same time, each like ms_transition_run. If one transition fails,
 * the others are not affected. Before any transition copies data, waits for all work submitted to
 * the devices before the call. Returns when all transitions have ended. `results[i]` is the result
 * of `transitions[i]`.
 *
 * Threads: the first transition runs on the calling thread, and each of the others runs on a new
 * thread, which ends before the call returns. Transitions for which no thread can be started run on
 * the calling thread, one after the other.
 *
 * Errors: MS_INVALID_ARGUMENT if a transition is null or in the list twice; MS_INVALID_STATE in a
 * forked child. After these errors, no transition has run, and `results` is unchanged. */
MS_API ms_status ms_transition_run_all(ms_transition* const* transitions, size_t count,
                                       ms_run_result* results, ms_error* error);

/* Transfers the transition to another thread, which must run it. Afterwards, calls on the thread
 * that began the transition wait for it like calls on any other thread.
 * Errors: MS_INVALID_STATE if the transition has already been run. */
MS_API ms_status ms_transition_hand_over(ms_transition* transition, ms_error* error);

/* Sets a description of the transition's caller, for example a file and line, which ms_locate and
 * the timeline report.
 * Threads: call this function only on the thread that begins or runs the transition, before the
 * run.
 * Errors: MS_INVALID_STATE if the transition has already been run. */
MS_API ms_status ms_transition_set_caller(ms_transition* transition, const char* caller,
                                          ms_error* error);

/* Reports the number of bytes copied so far and the total number of bytes to copy. The total grows
 * while the transition starts, and shrinks when unchanged pieces are found. */
MS_API void ms_transition_progress(const ms_transition* transition, uint64_t* done_bytes,
                                   uint64_t* total_bytes);

/* Makes work that is submitted to `stream` (a CUstream) after this call wait for the transition.
 * For a resume, returns when all copies are queued on the devices; for any other transition,
 * returns when the transition has ended.
 * Errors: MS_INVALID_STATE if the transition failed, or if the wait would deadlock because this
 * thread owns the transition and has not run it, or because the transition's owner is waiting for
 * this thread. */
MS_API ms_status ms_transition_wait_stream(ms_transition* transition, void* stream,
                                           ms_error* error);

/* Like ms_transition_wait_stream, but makes the work wait only for the contents of `ranges`, that
 * is, for the resume's copies into these ranges and all copies queued before them. If an address is
 * outside the memory that is being resumed, the work waits for all copies. If `range_count` is 0,
 * the work waits for no copies, but the call still returns only when all copies are queued.
 * `stream` points to a CUstream; if `stream` is NULL, the calling thread waits.
 * Errors: the errors of ms_transition_wait_stream; MS_DRIVER_FAILED if a copy fails while this
 * thread waits. */
MS_API ms_status ms_transition_wait_ranges(ms_transition* transition, const ms_range* ranges,
                                           size_t range_count, void* const* stream,
                                           ms_error* error);

/* Frees a transition that is not running. A transition that was never run is cancelled, and no tag
 * changes. Accepts NULL. */
MS_API void ms_transition_free(ms_transition* transition);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_TRANSITIONS_H_ */
