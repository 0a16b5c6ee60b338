/* memsaver.h: device memory that can be released and restored. Each allocation belongs to a named
 * group, its tag. A pause of a tag releases its device memory but keeps its addresses; a resume
 * maps memory at these addresses again and restores the contents.
 *
 * Together with memsaver_inspection.h (statistics, the timeline, addresses, fingerprints) and
 * memsaver_sharing.h (memory that several processes share), this is the C interface of
 * libmemsaver.so. Hooks and bindings include only these headers.
 *
 * Contract of every function in the three headers:
 *   - Any thread may call it at any time: before main, during process exit and in a forked child.
 *     In a forked child the library is inert: calls that would use the driver return
 *     MS_INVALID_STATE.
 *   - It throws no C++ exception, raises no signal, never terminates the process and never writes
 *     to stdout.
 *   - A function that can fail returns an ms_status. `ms_error* error` may be NULL and is written
 *     only on failure. Besides the errors in its comment, a function can return
 *     MS_OUT_OF_HOST_MEMORY, MS_INVALID_ARGUMENT for a required pointer that is NULL and, if it
 *     uses the driver, MS_NOT_LOADED and MS_DRIVER_FAILED.
 *   - A tag's name is UTF-8 and not empty; its length is unlimited. A returned `const char* tag` is
 *     valid until the process exits. U+001F in a name is reserved for memsaver's adapters, which
 *     append it and the name of a backup policy: TAG\x1fhost is the part of TAG whose contents are
 *     backed up to host memory.
 *   - Names of sizes end in _bytes, and names of times in _seconds. Addresses are device addresses,
 *     except those named `host`. A `device` is its ordinal in the process.
 *   - A function that returns a list allocates it; the caller frees it with ms_list_free.
 *     `row_count` may be NULL.
 *
 * The first tag starts a thread of the library, which sleeps until `memsaver top` of the same user
 * requests the statistics. If option `top` (MEMSAVER_TOP) is off, there is no thread.
 */
#ifndef MEMSAVER_H_
#define MEMSAVER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MS_API __attribute__((visibility("default")))

typedef enum ms_status {
  MS_OK = 0,
  MS_INVALID_ARGUMENT = 1,     /* a value that is invalid in every state */
  MS_INVALID_STATE = 2,        /* a call that is invalid in the current state */
  MS_UNKNOWN_TAG = 3,          /* no region has ever named the tag */
  MS_OUT_OF_DEVICE_MEMORY = 4, /* see needed_bytes and free_bytes */
  MS_OUT_OF_HOST_MEMORY = 5,   /* not enough host memory for a backup or for the call */
  MS_BACKUP_FAILED = 6,        /* a backup could not be written or read */
  MS_DRIVER_FAILED = 7,        /* a driver call failed: see `call` and `cuda_error` */
  MS_NOT_LOADED = 8,           /* no usable CUDA driver */
  MS_BAD_CONFIG = 9,           /* an option or environment variable has an invalid value */
  MS_NOT_OURS = 10,            /* this library did not allocate the pointer */
  MS_INTERNAL = 11,            /* a bug in memsaver */
  MS_TAG_SHARED = 12,          /* a tag cannot be paused: other processes map its memory */
  MS_SHARING_FAILED = 13       /* memory cannot be shared with another process */
} ms_status;

/* The state of a tag. */
typedef enum ms_state {
  MS_MAPPED = 0,   /* the tag's addresses have memory */
  MS_SAVING = 1,   /* a pause is in progress */
  MS_PAUSED = 2,   /* the tag's addresses have no memory; accesses fault */
  MS_RESTORING = 3 /* a resume is in progress */
} ms_state;

/* The backup policy of a tag, which determines what a pause does with the contents. */
typedef enum ms_backup {
  MS_BACKUP_DEFAULT = -1, /* the tag's current policy; see ms_region_enter */
  MS_BACKUP_NONE = 0,     /* contents are discarded; resumed memory reads as zero, or as
                              0xFF with option `poison` */
  MS_BACKUP_HOST = 1,     /* contents are saved in pinned host memory */
  MS_BACKUP_PAGEABLE = 2, /* contents are saved in ordinary host memory, through pinned buffers */
  MS_BACKUP_DISK = 3, /* contents are saved in a private file in the directory set by disk_dir */
  MS_BACKUP_PEER = 4  /* contents are saved in the memory of another device (options peer and
                         peer_margin_bytes), or in pinned host memory if it has no room */
} ms_backup;

typedef struct ms_error {
  int32_t status;     /* an ms_status */
  int32_t cuda_error; /* the CUresult of `call`, or 0 if no driver call failed */
  int32_t os_error;   /* the errno of the file operation that failed, or 0 */
  int32_t device;     /* the device that is out of memory, or -1 */
  /* the bytes that the failed step needed, and those that were free on the device, in host memory
   * or in the file system; 0 if not known */
  uint64_t needed_bytes, free_bytes;
  char call[48];      /* the name of the driver call that failed, or "" */
  char tag[128];      /* the tag concerned, truncated to fit, or "" */
  char message[1024]; /* what happened and what to do, one paragraph */
} ms_error;

typedef struct ms_range {
  uint64_t address, bytes;
} ms_range;

/* A transition's result for one tag on one device. */
typedef struct ms_change {
  const char* tag;
  int32_t device;
  int32_t changed;       /* 0: the tag was already in the requested state */
  uint64_t device_bytes; /* device memory released or mapped */
  uint64_t copied_bytes; /* bytes copied to or from the backup */
} ms_change;

/* --- the library */

/* Returns "major.minor.patch". Does not use the driver. */
MS_API const char* ms_version(void);

/* Opens the driver. Returns its version (13000 for 13.0) and the name of its library
 * ("libcuda.so.1", or the value of MEMSAVER_DRIVER). Sets `simulated` to 1 for the simulated
 * driver, otherwise to 0. Creates no CUDA context.
 * Errors: MS_NOT_LOADED if there is no driver, or it has no virtual memory management. */
MS_API ms_status ms_driver_info(int* version, const char** library, int* simulated,
                                ms_error* error);

/* Returns a device's free and total memory, as reported by the driver (-1: the calling thread's
 * current device).
 * Errors: MS_INVALID_ARGUMENT if there is no such device. */
MS_API ms_status ms_device_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes,
                                  ms_error* error);

/* Writes a device's bus id, which the system and NVML use ("0000:17:00.0"), truncated to `capacity`
 * bytes and always terminated (-1: the calling thread's current device).
 * Errors: those of ms_device_memory; MS_INVALID_ARGUMENT if `capacity` is 0. */
MS_API ms_status ms_device_bus_id(int device, char* text, size_t capacity, ms_error* error);

/* Returns the number of devices that the process can use. */
MS_API ms_status ms_device_count(int* count, ms_error* error);

/* Sets the option `name` to `value`, as text.
 * Errors: MS_BAD_CONFIG if the option does not exist or the value is invalid. */
MS_API ms_status ms_configure(const char* name, const char* value, ms_error* error);

/* Writes an option's value as text, truncated to `capacity` bytes and always terminated.
 * Errors: MS_BAD_CONFIG if the option does not exist or its environment variable is invalid;
 * MS_INVALID_ARGUMENT if `capacity` is 0. */
MS_API ms_status ms_option(const char* name, char* value, size_t capacity, ms_error* error);

/* Removes the oldest warning from the process's queue and writes its text, truncated to `capacity`
 * bytes and always terminated. Returns 1, or 0 if the queue is empty. A warning is a failure that
 * could not be returned to a caller, for example of a free in a hook. The queue keeps 64 warnings;
 * one more entry counts the later ones. */
MS_API int ms_next_warning(char* text, size_t capacity);

/* Adds a warning to the queue, for a hook whose signature cannot return an error. */
MS_API void ms_warn(const char* text);

/* Frees a list that a function of this library returned. Accepts NULL. */
MS_API void ms_list_free(void* list);

/* --- regions: the tag of this thread's allocations */

/* Enters a region on this thread: until the matching ms_region_exit, the thread's allocations
 * belong to `tag`, which is created if necessary. Regions nest. `backup` becomes the tag's policy;
 * MS_BACKUP_DEFAULT keeps an existing tag's policy and means MS_BACKUP_NONE for a new one. Does not
 * use the driver. Waits while a transition of the tag is in progress.
 * Errors: MS_INVALID_ARGUMENT for an empty tag or an unknown backup; MS_INVALID_STATE if the tag is
 * paused or the wait would deadlock. */
MS_API ms_status ms_region_enter(const char* tag, int backup, ms_error* error);

/* Limits this thread's innermost region to the devices whose bits are set in `devices` (bit n for
 * device n; devices from 64 on are always included). On other devices the thread's allocations
 * belong to no tag: ms_malloc fails with MS_INVALID_STATE, and ms_malloc_any allocates plain
 * memory. Without a limit a region applies to every device.
 * Errors: MS_INVALID_STATE outside any region. */
MS_API ms_status ms_region_limit(uint64_t devices, ms_error* error);

/* Leaves this thread's innermost region or disabled section.
 * Errors: MS_INVALID_STATE if there is none. */
MS_API ms_status ms_region_exit(ms_error* error);

/* Enters a disabled section on this thread: until the matching ms_region_exit, the thread's
 * allocations belong to no tag, not even to the process-wide tag (MEMSAVER_TAG). */
MS_API ms_status ms_disable_enter(ms_error* error);

/* Returns the tag that an allocation of this thread would belong to now, or NULL. */
MS_API const char* ms_region_tag(void);

/* Returns the depth of this thread's stack of regions and disabled sections. */
MS_API size_t ms_region_depth(void);

/* Binds `stream` to `tag` until ms_stream_unbind: allocations that ms_malloc_any makes on the
 * stream for threads outside any region belong to the tag. A captured backward pass, for example,
 * allocates on autograd's threads. A binding counts as an open region, and replaces the stream's
 * earlier binding. `backup` is as in ms_region_enter.
 * Errors: those of ms_region_enter. */
MS_API ms_status ms_stream_bind(void* stream, const char* tag, int backup, ms_error* error);

/* Ends the binding of `stream`.
 * Errors: MS_INVALID_STATE if the stream is bound to no tag. */
MS_API ms_status ms_stream_unbind(void* stream, ms_error* error);

/* --- memory */

/* Allocates `bytes` of device memory for this thread's tag on `device` (-1: the calling thread's
 * current device). The address is aligned to 512 bytes, or to the driver's granularity if `bytes`
 * reaches it; it is NULL for 0 bytes. Contents are undefined. If the thread has no current context,
 * the device's primary context becomes current, as with cudaMalloc. Legal during a stream capture.
 * Waits while a transition of the tag is in progress.
 * Errors: MS_INVALID_STATE if the thread is in no region for the device, the tag is paused or the
 * wait would deadlock; MS_INVALID_ARGUMENT if there is no such device; MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_malloc(uint64_t bytes, int device, void** pointer, ms_error* error);

/* Frees memory that ms_malloc allocated; accepts NULL. Legal in every state of the tag. Like
 * cudaFree, waits for the device's work before memory is released to the driver or reused.
 * Errors: MS_NOT_OURS if ms_malloc did not allocate `pointer`; MS_INVALID_ARGUMENT if it is not the
 * start of a live allocation. After either error, nothing is freed. */
MS_API ms_status ms_free(void* pointer, ms_error* error);

/* Returns 1 if the address lies in memory that this library reserved. Takes no lock, and costs a
 * few nanoseconds. */
MS_API int ms_owns(const void* pointer);

/* Returns 1 if ms_malloc would allocate for this thread: the thread is in a region, or the process
 * has a tag (MEMSAVER_TAG) that is mapped, and no disabled section is open. Takes no lock, and
 * costs a few nanoseconds. */
MS_API int ms_wants(void);

/* The counterparts of ms_malloc and ms_free for an allocator that must serve every thread. For a
 * thread outside any region, the memory belongs to the tag that is bound to the stream, otherwise
 * to the process-wide tag. If there is neither, it is plain device memory, which no pause affects.
 * ms_free_any accepts both kinds.
 * Errors: those of ms_malloc and ms_free, except for a thread in no region. */
MS_API ms_status ms_malloc_any(uint64_t bytes, int device, void* stream, void** pointer,
                               ms_error* error);
MS_API ms_status ms_free_any(void* pointer, int device, ms_error* error);

/* ms_malloc_any and ms_free_any with the signatures that torch's CUDAPluggableAllocator expects. A
 * failure adds a warning, and ms_torch_malloc returns NULL. */
MS_API void* ms_torch_malloc(ptrdiff_t bytes, int device, void* stream);
MS_API void ms_torch_free(void* pointer, size_t bytes, int device, void* stream);

typedef void* (*ms_torch_malloc_function)(ptrdiff_t bytes, int device, void* stream);

/* Returns a function for a torch pool of `tag`: like ms_torch_malloc, but its memory belongs to
 * that tag, regardless of the calling thread's region. It fails while the tag is paused. Every call
 * with the same tag returns the same function. `backup` is as in ms_region_enter.
 * Errors: those of ms_region_enter; MS_INVALID_STATE also if 256 tags already have a function. */
MS_API ms_status ms_torch_malloc_of(const char* tag, int backup, ms_torch_malloc_function* function,
                                    ms_error* error);

/* Allows devices that came into use after memory was mapped to access that memory, if the hardware
 * permits it; allocations and resumes also do this. A mapping is made for the devices that are in
 * use at that time, and cudaDeviceEnablePeerAccess changes the access only to cudaMalloc's memory.
 * Waits for transitions in progress.
 * Errors: MS_DRIVER_FAILED if the driver does not report which devices are in use. */
MS_API ms_status ms_refresh_peers(ms_error* error);

/* --- transitions: pauses, resumes and swaps
 *
 * The functions below call none of the callbacks that Python's on_pause and on_resume register. */

/* Returns a counter that every allocation, free and entered region increments. */
MS_API uint64_t ms_changes(void);

/* Waiting for a tag.
 *
 * A call that needs a tag waits while a transition in progress or another thread's reservation owns
 * the tag. If the wait would deadlock, the call changes nothing and returns MS_INVALID_STATE. The
 * wait would deadlock if the calling thread has begun a transition of the tag and has neither run
 * it nor handed it over (for example in a signal handler or a finalizer), or if the threads that
 * own the tag wait for this thread in turn. This applies to every function below that begins
 * transitions, reserves or waits, and to ms_region_enter, ms_stream_bind, ms_malloc, ms_malloc_any,
 * ms_torch_malloc_of, ms_backup_view, ms_retained_view, ms_fingerprint and ms_importer_export.
 * ms_free never fails for this reason: if necessary, the end of the transition releases the
 * memory. */

/* Sets the calling thread's callback. While a call on this thread waits for a tag, the library
 * calls `look(data)` about every 50 ms on the same thread. No lock of the library is owned during
 * the callback, so `look` may call the library. A result other than 0 ends the wait with
 * MS_INVALID_STATE. NULL removes the callback. */
MS_API void ms_while_waiting(int (*look)(void* data), void* data);

/* A reservation: the exclusive right to begin transitions of some tags, for work that must run
 * together with a transition. Only the owning thread can begin transitions of the tags, or reserve
 * them again (reservations nest). Other threads that try to do so wait, but can allocate in the
 * tags. */
typedef struct ms_reservation ms_reservation;

/* Reserves `tags` for the calling thread; an empty list means every tag. Waits until no other
 * thread owns a reservation or a transition of any of them.
 * Errors: MS_UNKNOWN_TAG; MS_INVALID_STATE if the wait would deadlock. */
MS_API ms_status ms_reserve(const char* const* tags, size_t tag_count, ms_reservation** reservation,
                            ms_error* error);

/* Hands the reservation, and transitions of its tags that this thread has begun, over to another
 * thread, which must call ms_reservation_take_over. Afterwards this thread's calls wait like those
 * of any other thread. Does nothing if the other thread has already taken the reservation over. */
MS_API ms_status ms_reservation_hand_over(ms_reservation* reservation, ms_error* error);
MS_API ms_status ms_reservation_take_over(ms_reservation* reservation, ms_error* error);

/* Releases the reservation; the calling thread need not own it. Further calls do nothing. */
MS_API ms_status ms_reservation_release(ms_reservation* reservation, ms_error* error);

/* Waits at most `seconds` (negative: without a limit) for the release of the reservation. Sets
 * `is_over` to 1 if it was released, otherwise to 0.
 * Errors: MS_INVALID_STATE if this thread owns the reservation, or its owner waits for this thread.
 */
MS_API ms_status ms_reservation_wait(ms_reservation* reservation, double seconds, int* is_over,
                                     ms_error* error);

/* Releases and frees the reservation. No other thread may be using it. Accepts NULL. */
MS_API void ms_reservation_free(ms_reservation* reservation);

/* A pause, a resume, or both. The thread that begins a transition owns it until the transition is
 * handed over; then the thread that runs it owns it. */
typedef struct ms_transition ms_transition;

/* Passed as `out_count` or `into_count`: selects every tag. */
#define MS_ALL_TAGS ((size_t)-1)

/* Begins a transition that releases the device memory of the tags `out` and maps that of the tags
 * `into` again, at the same addresses, on every device; all or nothing. Without `into` it is a
 * pause, without `out` a resume, with both a swap, which copies in both directions at once and maps
 * pages of `out` for `into` without releasing them. Tags of `out` that are already paused and tags
 * of `into` that are already mapped are not changed.
 *
 * After this call the transition owns the tags, and conflicting calls wait (see "Waiting for a
 * tag"), so the transition must be run or freed.
 *
 * `backup` overrides the policies of the tags of `out` for this transition. Without `out`,
 * MS_BACKUP_NONE restores nothing: all bytes read as if a pause had not saved them. `unowned` lists
 * memory that no tensor owns: it is neither saved nor restored. `changes` is a result of ms_changes
 * from before `unowned` was determined: if the counter has changed since, `unowned` is ignored
 * (NULL: `unowned` is up to date). Bytes that were not saved read as zero after the resume, or as
 * 0xFF with option `poison`.
 *
 * Errors: MS_UNKNOWN_TAG; MS_INVALID_STATE if a region of a tag of `out` is open on a thread, or
 * the wait would deadlock; MS_INVALID_ARGUMENT if a tag is in both lists, or both are empty;
 * MS_TAG_SHARED if other processes map memory of a tag of `out` (see memsaver_sharing.h). */
MS_API ms_status ms_transition_begin(const char* const* out, size_t out_count,
                                     const char* const* into, size_t into_count, int backup,
                                     const ms_range* unowned, size_t unowned_count,
                                     const uint64_t* changes, ms_transition** transition,
                                     ms_error* error);

/* Begins a pause: ms_transition_begin without `into`. An empty list of tags means every tag. */
MS_API ms_status ms_pause_begin(const char* const* tags, size_t tag_count, int backup,
                                const ms_range* unowned, size_t unowned_count,
                                const uint64_t* changes, ms_transition** transition,
                                ms_error* error);

/* Begins a resume: ms_transition_begin without `out`. An empty list of tags means every tag. */
MS_API ms_status ms_resume_begin(const char* const* tags, size_t tag_count,
                                 ms_transition** transition, ms_error* error);

/* Begins a swap: ms_transition_begin with both lists.
 * Errors: those of ms_transition_begin; MS_INVALID_ARGUMENT also if either list is empty. */
MS_API ms_status ms_swap_begin(const char* const* out, size_t out_count, const char* const* into,
                               size_t into_count, int backup, const ms_range* unowned,
                               size_t unowned_count, const uint64_t* changes,
                               ms_transition** transition, ms_error* error);

/* Runs the transition, once, and releases the tags. On success `rows`, which may be NULL, has one
 * row for each tag and device, those of `out` first. If tags of `out` have memory, waits for all
 * work submitted earlier to the devices.
 *
 * Errors: MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY, MS_BACKUP_FAILED, MS_DRIVER_FAILED;
 * MS_INVALID_STATE if the transition was run before.
 *
 * After an error every tag of `out` is mapped with its contents, and every tag of `into` is paused
 * with its backup and uses no device memory; the caller may begin the same transition again. There
 * are two exceptions:
 *   - If `into` has tags, the contents of tags of `out` without a backup may be lost.
 *   - If the rollback also fails, the tags of `out` are paused, and their contents are in their
 *     backups or in retained pages; the error message reports this, and a resume restores them. */
MS_API ms_status ms_transition_run(ms_transition* transition, ms_change** rows, size_t* row_count,
                                   ms_error* error);

/* The result of one transition of ms_transition_run_all. */
typedef struct ms_run_result {
  int32_t status;   /* the ms_status that ms_transition_run would return */
  size_t row_count; /* the length of `rows`; 0 after an error */
  ms_change* rows;  /* free with ms_list_free */
  ms_error error;   /* set if `status` is not MS_OK */
} ms_run_result;

/* Runs `count` transitions at the same time, each like ms_transition_run. A failure of one does not
 * affect the others. Waits for the work submitted earlier before the first transition copies, and
 * returns when all transitions have ended. `results[i]` is the result of `transitions[i]`.
 *
 * Threads: the first transition runs on the calling thread, every other one on a new thread that
 * ends with the call. Transitions for which no thread can be started run on the calling thread, one
 * by one.
 *
 * Errors: MS_INVALID_ARGUMENT if a transition is null or in the list twice; MS_INVALID_STATE in a
 * forked child. After these errors, no transition has run, and `results` is unchanged. */
MS_API ms_status ms_transition_run_all(ms_transition* const* transitions, size_t count,
                                       ms_run_result* results, ms_error* error);

/* Hands the transition over to another thread, which must run it. Afterwards the calls of the
 * thread that began it wait for the transition like those of any other thread.
 * Errors: MS_INVALID_STATE if the transition was run. */
MS_API ms_status ms_transition_hand_over(ms_transition* transition, ms_error* error);

/* Sets a description of the transition's caller, for example a file and line, which ms_locate and
 * the timeline report.
 * Threads: only the thread that begins or runs the transition, before the run.
 * Errors: MS_INVALID_STATE if the transition was run. */
MS_API ms_status ms_transition_set_caller(ms_transition* transition, const char* caller,
                                          ms_error* error);

/* Reports the bytes copied so far, and the total bytes to copy. The total grows while the
 * transition starts, and shrinks when pieces turn out to be unchanged. */
MS_API void ms_transition_progress(const ms_transition* transition, uint64_t* done_bytes,
                                   uint64_t* total_bytes);

/* Makes work that is submitted to `stream` (a CUstream) after this call wait for the transition.
 * For a resume, returns when all copies are queued on the devices, otherwise when the transition is
 * over.
 * Errors: MS_INVALID_STATE if the transition failed, or if the wait would deadlock, because this
 * thread owns the transition and has not run it, or its owner waits for this thread. */
MS_API ms_status ms_transition_wait_stream(ms_transition* transition, void* stream,
                                           ms_error* error);

/* Like ms_transition_wait_stream, but makes the work wait only for the contents of `ranges`: for a
 * resume's copies into them, and the copies queued before those. If an address does not belong to
 * the resume, the work waits for all copies. Without ranges, it does not wait for copies, but the
 * call still returns only when all copies are queued. `stream` points to the CUstream; if it is
 * NULL, the calling thread waits.
 * Errors: those of ms_transition_wait_stream; MS_DRIVER_FAILED if a copy fails while this thread
 * waits. */
MS_API ms_status ms_transition_wait_ranges(ms_transition* transition, const ms_range* ranges,
                                           size_t range_count, void* const* stream,
                                           ms_error* error);

/* Frees a transition that is not running. If it was not run, it is cancelled: no tag changes.
 * Accepts NULL. */
MS_API void ms_transition_free(ms_transition* transition);

/* Pauses or resumes tags: begins, runs and frees a transition.
 * Errors: those of ms_transition_begin and ms_transition_run. */
MS_API ms_status ms_pause(const char* const* tags, size_t tag_count, int backup,
                          const ms_range* unowned, size_t unowned_count, const uint64_t* changes,
                          ms_change** rows, size_t* row_count, ms_error* error);
MS_API ms_status ms_resume(const char* const* tags, size_t tag_count, ms_change** rows,
                           size_t* row_count, ms_error* error);

/* --- the state of a tag */

/* Returns the state of a tag (an ms_state), which is the same on all its devices.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_state(const char* tag, int* state, ms_error* error);

/* Sets `pausable` to 1 if a pause of the tag would begin without waiting, otherwise to 0. It is 1
 * if all of these are true:
 *   - The tag is mapped.
 *   - None of the tag's regions is open.
 *   - The tag is not in use by a transition or another call.
 *   - No other thread has reserved the tag.
 *   - No other process maps the tag's memory.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_pausable(const char* tag, int* pausable, ms_error* error);

/* Returns the backup policy of a tag (an ms_backup).
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_backup(const char* tag, int* backup, ms_error* error);

/* --- backups */

/* Returns the host address of the backup of [address, address + bytes) in a paused tag. Valid until
 * a resume of the tag begins or the range is freed. Pinned backups are contiguous, so that one call
 * copies the range to or from a device (an allocation of less than 1 MiB may be in two pieces).
 * `writable` must be 1 if the caller writes to the backup; the resume restores the written bytes.
 * Errors: MS_NOT_OURS; MS_INVALID_ARGUMENT if `bytes` is 0; MS_INVALID_STATE if the tag is not
 * paused, the range is not in one live allocation or was not saved completely (no backup, or
 * `unowned`), its backup is on disk or on another device, or the wait would deadlock. */
MS_API ms_status ms_backup_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                ms_error* error);

/* Returns the host address of the copy of [address, address + bytes) that the last pause of a
 * mapped tag saved. The address is that of ms_backup_view, and the contents are those of the pause.
 * Valid until the tag's next change or trim. `writable` must be 1 if the caller writes to the copy:
 * the next pause then always saves the range.
 * Errors: MS_NOT_OURS; MS_INVALID_ARGUMENT if `bytes` is 0; MS_INVALID_STATE if the tag is not
 * mapped, the range was not saved completely, its copy was trimmed, belongs to an earlier
 * allocation, or is on disk or on another device, or the wait would deadlock. */
MS_API ms_status ms_retained_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                  ms_error* error);

/* Releases the host memory, disk space and device memory of backups, except those of paused tags,
 * and the memory kept for computing fingerprints. Skips tags in a transition. Takes a tenth of a
 * second for 8 GiB on the host. Waits for all work on the devices. */
MS_API ms_status ms_trim(uint64_t* released_bytes, ms_error* error);

/* Like ms_trim, but only for the backups of `tags`; an empty list means every tag's backups.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_trim_tags(const char* const* tags, size_t tag_count, uint64_t* released_bytes,
                              ms_error* error);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_H_ */
