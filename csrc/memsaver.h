/* memsaver.h: the C ABI of libmemsaver.so, and the only header that hooks and bindings may include.
 *
 * Contract for every function here:
 *   - Any thread may call it at any time, before main, during process exit and in a forked child.
 * In a forked child the library is inert: calls that would touch the driver return
 * MS_INVALID_STATE.
 *   - It throws no C++ exception, raises no signal, never ends the process and never writes to
 * stdout.
 *   - On the simulated driver the first pause installs a handler of SIGSEGV, which writes to stderr
 * which paused tag was touched, and then passes the fault to the previous action.
 *   - The first tag starts a thread, which sleeps until `memsaver top` of the same user requests
 * the figures; option `top` (MEMSAVER_TOP) turns that off.
 *   - A failure is reported as an ms_status. `ms_error* error` may be NULL; it is written only on
 * failure.
 *   - Tags are UTF-8, of any length above zero. A returned `const char* tag` lives as long as the
 * process. U+001F in a tag is reserved for memsaver's adapters, which append it and the name of a
 * backup to a tag: TAG\x1fhost is the part of TAG whose contents are kept in host memory.
 *   - Sizes end in _bytes, times in _seconds; addresses are device addresses.
 *   - The caller releases a returned list (rows, count) with ms_list_free, which accepts NULL.
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
  MS_INVALID_ARGUMENT = 1,     /* a value that no state would make valid */
  MS_INVALID_STATE = 2,        /* a valid call at the wrong time */
  MS_UNKNOWN_TAG = 3,          /* no region ever named the tag */
  MS_OUT_OF_DEVICE_MEMORY = 4, /* needed_bytes and free_bytes say how much */
  MS_OUT_OF_HOST_MEMORY = 5,   /* a host backup found no memory */
  MS_BACKUP_FAILED = 6,        /* a backup could not be written or read */
  MS_DRIVER_FAILED = 7,        /* cuda_error and call say which driver call, and how */
  MS_NOT_LOADED = 8,           /* no usable CUDA driver */
  MS_BAD_CONFIG = 9,           /* an option or environment variable that cannot be understood */
  MS_NOT_OURS = 10,            /* the pointer was not allocated by this library */
  MS_INTERNAL = 11             /* a bug of ours */
} ms_status;

typedef enum ms_state {
  MS_MAPPED = 0,   /* memory behind every address */
  MS_SAVING = 1,   /* a pause is under way */
  MS_PAUSED = 2,   /* addresses only; touching them faults */
  MS_RESTORING = 3 /* a resume is under way */
} ms_state;

typedef enum ms_backup {
  MS_BACKUP_DEFAULT = -1, /* what the tag's region said */
  MS_BACKUP_NONE = 0,     /* contents are discarded; resumed memory reads as zero, with option
                             `poison` as bytes 0xFF */
  MS_BACKUP_HOST = 1,     /* contents are kept in pinned host memory */
  MS_BACKUP_PAGEABLE = 2, /* in ordinary host memory, through pinned buffers */
  MS_BACKUP_DISK = 3      /* in a private file under option disk_dir */
} ms_backup;

typedef struct ms_error {
  int32_t status;     /* an ms_status */
  int32_t cuda_error; /* the CUresult of `call`, 0 where no driver call failed */
  int32_t os_error;   /* the errno of a file operation that failed, 0 where none did */
  int32_t device;     /* where device memory was short: the device, else -1 */
  uint64_t needed_bytes, free_bytes;
  char call[48];      /* the driver call that failed, or "" */
  char tag[128];      /* the tag concerned, cut to fit, or "" */
  char message[1024]; /* what happened and what to do, one paragraph */
} ms_error;

typedef struct ms_range {
  uint64_t address, bytes;
} ms_range;

/* The 256-bit fingerprint of a piece of memory. */
typedef struct ms_digest {
  uint64_t lanes[4];
} ms_digest;

/* One tag on one device, as a pause or a resume left it. */
typedef struct ms_change {
  const char* tag;
  int32_t device;
  int32_t changed;       /* 0: it was in the wanted state already */
  uint64_t device_bytes; /* device memory given back or taken */
  uint64_t copied_bytes; /* bytes moved to or from the backup */
} ms_change;

/* The figures of one tag on one device: X(type, name, meaning). The fields are listed only here:
 * ms_usage, the JSON of `memsaver top`, Python's rows and the fields of TagStats
 * (build_support/usage_fields.py) are generated from this list. Counters and durations are the
 * tag's and equal in its rows of all devices; bytes are the device's. A failed transition changes
 * only `failures`. */
#define MS_USAGE_FIELDS(X)                                                                   \
  X(uint64_t, allocations,                                                                   \
    "live allocations: torch's segments, not its tensors; a freed one counts until its "     \
    "memory could be released")                                                              \
  X(uint64_t, allocated_bytes, "bytes of the live allocations, each rounded up to 512")      \
  X(uint64_t, resident_bytes, "device memory held, as the driver counts it")                 \
  X(uint64_t, backup_bytes, "bytes that the next resume restores")                           \
  X(uint64_t, host_bytes,                                                                    \
    "host memory held for backups, kept for the next pause until it is trimmed")             \
  X(uint64_t, disk_bytes,                                                                    \
    "file space held for backups, kept for the next pause until it is trimmed")              \
  X(uint64_t, pauses, "pauses of the tag that succeeded, including swaps that paused it")    \
  X(uint64_t, resumes, "resumes of the tag that succeeded, including swaps that resumed it") \
  X(double, last_pause_seconds, "duration of the last pause, for all tags of its call")      \
  X(double, last_resume_seconds, "duration of the last resume, for all tags of its call")    \
  X(uint64_t, failures, "pauses, resumes and swaps of the tag that failed")                  \
  X(double, pause_seconds, "total duration of the pauses")                                   \
  X(double, resume_seconds, "total duration of the resumes")                                 \
  X(uint64_t, last_paused_bytes, "device memory that the last pause released")               \
  X(uint64_t, last_saved_bytes, "bytes that the last pause copied to the backup")            \
  X(uint64_t, last_resumed_bytes, "device memory that the last resume mapped")               \
  X(uint64_t, last_restored_bytes, "bytes that the last resume copied from the backup")      \
  X(uint64_t, paused_bytes, "device memory that all pauses released")                        \
  X(uint64_t, saved_bytes, "bytes that all pauses copied to the backup")                     \
  X(uint64_t, resumed_bytes, "device memory that all resumes mapped")                        \
  X(uint64_t, restored_bytes, "bytes that all resumes copied from the backup")               \
  X(uint64_t, last_unchanged_pieces,                                                         \
    "pieces of at most 1 MiB that the last pause did not copy, because their fingerprints "  \
    "matched the backup")                                                                    \
  X(uint64_t, last_unchanged_bytes, "bytes of these pieces")                                 \
  X(uint64_t, unchanged_pieces, "unchanged pieces of all pauses")                            \
  X(uint64_t, unchanged_bytes, "bytes of the unchanged pieces of all pauses")

/* One tag on one device, now. */
typedef struct ms_usage {
  const char* tag;
  int32_t device; /* -1: the tag has no memory */
  int32_t state;  /* an ms_state */
  int32_t backup; /* an ms_backup: the tag's policy */
#define MS_USAGE_MEMBER(type, name, meaning) type name;
  MS_USAGE_FIELDS(MS_USAGE_MEMBER)
#undef MS_USAGE_MEMBER
} ms_usage;

/* What an event of a timeline is. */
typedef enum ms_event_kind {
  MS_EVENT_BASELINE = 0, /* a tag on a device as it was before its first event that is kept */
  MS_EVENT_ALLOCATE = 1,
  MS_EVENT_FREE = 2,  /* memory of frees was given back; during a transition, at its end */
  MS_EVENT_BEGIN = 3, /* a transition began; one for each of its tags and devices */
  MS_EVENT_END = 4,   /* a transition ended; one for each of its tags and devices */
  MS_EVENT_MEMORY = 5 /* what the driver says of a device */
} ms_event_kind;

typedef enum ms_act { MS_NO_ACT = 0, MS_PAUSE = 1, MS_RESUME = 2, MS_SWAP = 3 } ms_act;

typedef enum ms_outcome {
  MS_DONE = 0,
  MS_FAILED = 1,
  MS_GIVEN_UP = 2 /* it was begun, and freed without being run */
} ms_outcome;

/* One event of a timeline. What does not concern its kind is 0, "" or NULL. */
typedef struct ms_event {
  double time_seconds; /* of CLOCK_MONOTONIC */
  int32_t kind;        /* an ms_event_kind */
  int32_t device;      /* -1: a tag without memory */
  const char* tag;     /* NULL of MS_EVENT_MEMORY */
  int32_t state;       /* an ms_state: the tag's, after the event */
  int32_t act;         /* an ms_act, of a transition */
  int32_t outcome;     /* an ms_outcome, of its end */
  int64_t thread;      /* of a transition: the system's number of the thread that began it */
  uint64_t allocated_bytes, resident_bytes; /* the tag's on the device, after the event */
  uint64_t transition; /* the same of all events of one transition, unlike every other's */
  uint64_t device_bytes, copied_bytes; /* of an end that is done: as in ms_change */
  uint64_t free_bytes, total_bytes;    /* of MS_EVENT_MEMORY */
  char caller[256];                    /* of an end: as in ms_location; of a long one its end */
} ms_event;

/* Where an address lies. */
typedef struct ms_location {
  const char* tag;
  int32_t device;
  int32_t state; /* an ms_state: the tag's */
  uint64_t address,
      bytes;            /* the live allocation around it; 0 bytes: it is freed, or was none yet */
  double since_seconds; /* when the tag came into that state, in seconds since 1970 */
  int64_t thread;       /* the system's number of the thread whose call brought it there */
  char caller[1024]; /* what ms_transition_set_caller said of that call, of a long text its end */
} ms_location;

/* --- the library */

/* "major.minor.patch". Touches no driver. */
MS_API const char* ms_version(void);

/* Opens the driver and returns its version (13000 for 13.0) and the library that answers for it
 * ("libcuda.so.1", or what MEMSAVER_DRIVER names). `simulated` is 1 for the simulated driver.
 * Starts no CUDA context. MS_NOT_LOADED: no driver, or one without virtual memory management; the
 * message says what to do. */
MS_API ms_status ms_driver_info(int* version, const char** library, int* simulated,
                                ms_error* error);

/* Bytes free and in total on a device, as the driver says. */
MS_API ms_status ms_device_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes,
                                  ms_error* error);

/* Writes the bus id by which the system and NVML know a device ("0000:17:00.0"), cut to `capacity`
 * and terminated. */
MS_API ms_status ms_device_bus_id(int device, char* text, size_t capacity, ms_error* error);

/* The number of devices. */
MS_API ms_status ms_device_count(int* count, ms_error* error);

/* Sets an option by its name in the options table; the value is text. MS_BAD_CONFIG names the known
 * ones. */
MS_API ms_status ms_configure(const char* name, const char* value, ms_error* error);

/* Writes an option's value as text, cut to `capacity` bytes and always terminated. */
MS_API ms_status ms_option(const char* name, char* value, size_t capacity, ms_error* error);

/* Takes the oldest failure that could reach no caller (a free that failed in a hook, say) as text,
 * cut to `capacity` and terminated. Returns 1 when there was one, else 0. The queue keeps the
 * first 64. */
MS_API int ms_next_warning(char* text, size_t capacity);

/* Adds one: for hooks, whose callers' signatures have no room for a reason. */
MS_API void ms_warn(const char* text);

MS_API void ms_list_free(void* list);

/* --- regions: which tag this thread's allocations belong to */

/* Enters a region on this thread. `backup` becomes the tag's policy; MS_BACKUP_DEFAULT keeps an
 * existing tag's policy and means MS_BACKUP_NONE for a new one. Touches no driver.
 * Waits while the tag is being paused or resumed. MS_INVALID_ARGUMENT: empty tag, unknown backup.
 * MS_INVALID_STATE: the tag is paused. */
MS_API ms_status ms_region_enter(const char* tag, int backup, ms_error* error);

/* Only allocations on these devices (bit n: device n, the first 64) belong to the innermost region
 * of this thread; on others to no tag: ms_malloc refuses them with MS_INVALID_STATE, ms_malloc_any
 * gives plain memory. Without it a region is for every device. MS_INVALID_STATE: the thread is in
 * none. */
MS_API ms_status ms_region_limit(uint64_t devices, ms_error* error);

/* Leaves the innermost region or disabled section of this thread. MS_INVALID_STATE: there is none.
 */
MS_API ms_status ms_region_exit(ms_error* error);

/* Until the matching ms_region_exit, this thread's allocations belong to no tag, the process's own
 * included. */
MS_API ms_status ms_disable_enter(ms_error* error);

/* The tag that an allocation of this thread would get now, or NULL. */
MS_API const char* ms_region_tag(void);

/* The depth of this thread's stack of regions and disabled sections. */
MS_API size_t ms_region_depth(void);

/* Allocations requested by ms_malloc_any on `stream` by threads outside any region belong to `tag`
 * until ms_stream_unbind: a captured backward pass allocates on autograd's threads. Counts as an
 * open region. */
MS_API ms_status ms_stream_bind(void* stream, const char* tag, int backup, ms_error* error);
MS_API ms_status ms_stream_unbind(void* stream, ms_error* error);

/* --- memory */

/* Allocates `bytes` of device memory for this thread's tag on `device` (-1: the calling thread's
 * current device), aligned to 512 bytes, and to the driver's granularity from that size on; 0 bytes
 * are NULL. Contents are undefined. A thread without a current context gets the device's primary
 * one, as with cudaMalloc. Legal inside a stream capture. Waits while a pause or resume of
 * the tag is under way. MS_INVALID_STATE: the thread is in no region, or the tag is paused.
 * MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_malloc(uint64_t bytes, int device, void** pointer, ms_error* error);

/* Frees what ms_malloc gave. Legal in every state of the tag; waits for the device's work where
 * memory goes back to the driver or to the next allocation, as cudaFree does. MS_NOT_OURS: not a
 * pointer of ours: nothing was done. */
MS_API ms_status ms_free(void* pointer, ms_error* error);

/* 1 if the address lies in memory that this library reserved. No lock, a few nanoseconds. */
MS_API int ms_owns(const void* pointer);

/* 1 if ms_malloc would serve this thread: it is in a region, or the process is in one
 * (MEMSAVER_TAG) and the tag is mapped, and neither is disabled. No lock, a few nanoseconds. */
MS_API int ms_wants(void);

/* The same for an allocator that must serve every thread: outside any region the tag is that of the
 * stream's binding, and where there is none the memory is plain device memory, which no pause
 * touches. ms_free_any takes either kind. */
MS_API ms_status ms_malloc_any(uint64_t bytes, int device, void* stream, void** pointer,
                               ms_error* error);
MS_API ms_status ms_free_any(void* pointer, int device, ms_error* error);

/* The same in the signatures that torch's CUDAPluggableAllocator expects. A failure is NULL, and a
 * warning. */
MS_API void* ms_torch_malloc(ptrdiff_t bytes, int device, void* stream);
MS_API void ms_torch_free(void* pointer, size_t bytes, int device, void* stream);

/* A function like ms_torch_malloc whose memory belongs to `tag`, whatever region its caller is in:
 * for a torch pool of that tag. It returns NULL while the tag is paused. The same function for
 * every call with the tag; `backup` as in ms_region_enter, and its errors. MS_INVALID_STATE also:
 * 256 tags have one already. */
typedef void* (*ms_torch_malloc_function)(ptrdiff_t bytes, int device, void* stream);
MS_API ms_status ms_torch_malloc_of(const char* tag, int backup, ms_torch_malloc_function* function,
                                    ms_error* error);

/* Lets devices whose use began after memory was mapped reach that memory too, where the hardware
 * allows it: memory of ours is mapped for the devices in use at that time, and unlike cudaMalloc's
 * not affected by cudaDeviceEnablePeerAccess. Allocations and resumes do it as well. Waits for
 * transitions under way. MS_DRIVER_FAILED where the driver does not say which devices are in use.
 */
MS_API ms_status ms_refresh_peers(ms_error* error);

/* --- transitions
 *
 * The functions below call none of the callbacks that Python's on_pause and on_resume register. */

/* A number that every allocation, free and opened region raises. */
MS_API uint64_t ms_changes(void);

/* Waiting for a tag.
 *
 * A call that needs a tag waits while a transition in progress or another thread's reservation has
 * the tag. If the wait would never end, the call changes nothing and returns MS_INVALID_STATE. That
 * is so if the calling thread has begun a transition of the tag and has neither run it nor handed
 * it over (for example in a signal handler or a finalizer), or if the threads that have the tag
 * wait for this thread in turn. This applies to every function below that begins transitions,
 * reserves or waits, and to ms_region_enter, ms_stream_bind, ms_malloc, ms_malloc_any,
 * ms_backup_view and ms_retained_view. ms_free is never refused: the end of the transition releases
 * the memory.
 *
 * ms_while_waiting: sets the calling thread's callback. While a call of this thread waits for a
 * tag, it calls `look(data)` about every 50 ms on this thread. It holds no lock of this library,
 * and `look` may call the library. A result other than 0 ends the wait with MS_INVALID_STATE. NULL
 * removes the callback. */
MS_API void ms_while_waiting(int (*look)(void* data), void* data);

/* The right to begin transitions of some tags, for work that must run together with a transition.
 *
 * Only the thread that owns a reservation can begin transitions of its tags, or make further,
 * nested reservations of them. Other threads wait, but may allocate in the tags. */
typedef struct ms_reservation ms_reservation;

/* Reserves `tags` for the calling thread; no tags at all means every tag. Waits until no other
 * thread has one of them reserved or in a transition. Errors: MS_UNKNOWN_TAG; MS_INVALID_STATE if
 * the wait would never end. */
MS_API ms_status ms_reserve(const char* const* tags, size_t tag_count, ms_reservation** reservation,
                            ms_error* error);

/* Hands the reservation, and transitions of its tags that this thread has begun, over to another
 * thread, which must call ms_reservation_take_over. From now on this thread's calls wait for them.
 * Does nothing if the other thread has already taken the reservation over. */
MS_API ms_status ms_reservation_hand_over(ms_reservation* reservation, ms_error* error);
MS_API ms_status ms_reservation_take_over(ms_reservation* reservation, ms_error* error);

/* Releases the reservation. Further calls do nothing. Any thread. */
MS_API ms_status ms_reservation_release(ms_reservation* reservation, ms_error* error);

/* Waits at most `seconds` (below zero: without a bound) for the release of the reservation. Sets
 * `is_over` to 1 if it was released, else to 0. Any thread. Errors: MS_INVALID_STATE if this thread
 * owns the reservation, or its owner waits for this thread. */
MS_API ms_status ms_reservation_wait(ms_reservation* reservation, double seconds, int* is_over,
                                     ms_error* error);

/* Releases and frees the reservation. No other thread may be using it. Accepts NULL. */
MS_API void ms_reservation_free(ms_reservation* reservation);

/* A pause, resume or swap in progress. It belongs to the thread that began it, then to the thread
 * that runs it. */
typedef struct ms_transition ms_transition;

/* Begins to release the device memory of `tags` on every device, all or nothing; no tags at all
 * means every tag. From here on the transition owns the tags, and conflicting calls wait (see
 * "Waiting for a tag"), so the transition must be run or freed. `backup` overrides the tags' policy
 * for this call. The bytes of `dead` are neither saved nor restored (after the resume they read as
 * zero, or poison). `changes` is the result of ms_changes from before `dead` was determined: if
 * ms_changes differs by now, everything is saved (NULL: the ranges are known to be dead).
 * Errors: MS_UNKNOWN_TAG; MS_INVALID_STATE if a region of a tag is open on a thread, or waiting for
 * a tag would never end.
 *
 * Running the transition waits for all work submitted to the devices before. Errors of the run:
 * MS_OUT_OF_HOST_MEMORY, MS_BACKUP_FAILED, MS_DRIVER_FAILED. After an error every selected
 * allocation is mapped with its bytes; or, if the driver also refused to map again the pages that
 * it had unmapped, the tags are paused with retained unmapped pages and contents intact, the
 * message says so, and a resume maps the pages. */
MS_API ms_status ms_pause_begin(const char* const* tags, size_t tag_count, int backup,
                                const ms_range* dead, size_t dead_count, const uint64_t* changes,
                                ms_transition** transition, ms_error* error);

/* Begins to map memory again behind the same addresses, and to restore the saved bytes. Bytes that
 * were not saved read as zero, with option `poison` as 0xFF. Errors: MS_UNKNOWN_TAG;
 * MS_INVALID_STATE if waiting for a tag would never end.
 *
 * Errors of the run: MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY (for staging),
 * MS_BACKUP_FAILED, MS_DRIVER_FAILED. After an error every selected tag is paused with its backup
 * and holds no device memory; the same call may be made again. */
MS_API ms_status ms_resume_begin(const char* const* tags, size_t tag_count,
                                 ms_transition** transition, ms_error* error);

/* Begins to pause `out` and resume `into` in one: all or nothing, copies in both directions at
 * once, pages handed over without passing through the driver. Tags of `out` that are paused and
 * tags of `into` that are mapped are left as they are; `backup`, `dead` and `changes` concern
 * `out`. MS_INVALID_ARGUMENT: an empty side, or a tag on both.
 * Running it: as a pause and a resume. After a failure every tag of `out` is mapped with its bytes
 * and every tag of `into` paused with its backup; but the contents of tags without a backup may be
 * gone, and where the driver also refused to undo, `out` is paused with all its bytes. */
MS_API ms_status ms_swap_begin(const char* const* out, size_t out_count, const char* const* into,
                               size_t into_count, int backup, const ms_range* dead,
                               size_t dead_count, const uint64_t* changes,
                               ms_transition** transition, ms_error* error);

/* Does it, once, on any thread, and lets the tags go. On success `rows` has one row for each tag
 * and device. */
MS_API ms_status ms_transition_run(ms_transition* transition, ms_change** rows, size_t* row_count,
                                   ms_error* error);

/* Hands the transition over to another thread, which must run it. From now on the calls of the
 * thread that began it wait for it. Errors: MS_INVALID_STATE if the transition was run. */
MS_API ms_status ms_transition_hand_over(ms_transition* transition, ms_error* error);

/* Says in words who a transition is for (a place in a program, say), for ms_locate. After its begin
 * and before its run, on the thread of either. MS_INVALID_STATE: it was run. */
MS_API ms_status ms_transition_set_caller(ms_transition* transition, const char* caller,
                                          ms_error* error);

/* Bytes copied so far, and in all: that grows while the transition starts and shrinks where pieces
 * are found unchanged. Any thread, until it is freed. */
MS_API void ms_transition_progress(const ms_transition* transition, uint64_t* done_bytes,
                                   uint64_t* total_bytes);

/* Orders work that is submitted to `stream` (a CUstream) from now on after the transition. For a
 * resume, returns when all copies are queued on the devices, else when the transition is over. Any
 * thread. Errors: MS_INVALID_STATE if the transition failed, or the wait would never end, because
 * this thread owns the transition and has not run it, or its owner waits for this thread. */
MS_API ms_status ms_transition_wait_stream(ms_transition* transition, void* stream,
                                           ms_error* error);

/* Not while it runs. One that was not run gives up: nothing happened. NULL is allowed. */
MS_API void ms_transition_free(ms_transition* transition);

/* Begin, run and free in one. */
MS_API ms_status ms_pause(const char* const* tags, size_t tag_count, int backup,
                          const ms_range* dead, size_t dead_count, const uint64_t* changes,
                          ms_change** rows, size_t* row_count, ms_error* error);
MS_API ms_status ms_resume(const char* const* tags, size_t tag_count, ms_change** rows,
                           size_t* row_count, ms_error* error);

/* The state of a tag, the same on all its devices. */
MS_API ms_status ms_tag_state(const char* tag, int* state, ms_error* error);

/* Whether a pause of a tag would begin at once: it is mapped, no region of it is open, and nobody
 * holds it. MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_pausable(const char* tag, int* pausable, ms_error* error);

/* The backup policy of a tag. */
MS_API ms_status ms_tag_backup(const char* tag, int* backup, ms_error* error);

/* Every tag and device. Tags without memory have one row with device -1. */
MS_API ms_status ms_stats(ms_usage** rows, size_t* row_count, ms_error* error);

/* Records what happens to the memory of tags from now on, in this process: a ring of `capacity`
 * events, which takes some 140 bytes for each. The oldest make place for new ones. A process
 * records one timeline at a time. Costs a load and a branch for each allocation while nothing is
 * recorded, some tens of nanoseconds otherwise; transitions then ask the driver for its free memory
 * at their begin and end. MS_INVALID_ARGUMENT: no events, or more than 2^24. MS_INVALID_STATE: one
 * is recorded already. */
MS_API ms_status ms_timeline_start(size_t capacity, ms_error* error);

/* What is recorded so far: baselines, one for each tag and device that was there before its first
 * event, then the events in the order of time, and how many older ones were dropped. Keeps other
 * calls waiting for about a millisecond for each 10,000 events. MS_INVALID_STATE: nothing is
 * recorded. */
MS_API ms_status ms_timeline_read(ms_event** rows, size_t* row_count, uint64_t* dropped,
                                  ms_error* error);

/* Adds what the driver says is free now, for each device that tags have memory of; there it costs a
 * driver call. Does nothing while nothing is recorded. */
MS_API ms_status ms_timeline_sample(ms_error* error);

/* Ends it and gives up its memory. MS_INVALID_STATE: nothing is recorded. */
MS_API ms_status ms_timeline_stop(ms_error* error);

/* The live allocations of a tag in address order, on `device`, or on all of them (-1). */
MS_API ms_status ms_ranges(const char* tag, int device, ms_range** rows, size_t* row_count,
                           ms_error* error);

/* Whose memory an address is, and who has it in its state since when. Makes no driver call and
 * waits for no transition: it answers after an illegal access, too. MS_NOT_OURS. */
MS_API ms_status ms_locate(const void* pointer, ms_location* location, ms_error* error);

/* Where the backup of [address, address + bytes) lies in host memory: valid until the tag's next
 * change. If that is pinned, then in one piece, from and to which a device copies it by one call
 * (a block of less than 1 MiB may be in two pieces). What a caller writes there comes back with the
 * resume, if it said that it is going to (`writable`); else it must not write. MS_INVALID_STATE:
 * the tag is not paused, or was paused without a backup or with one on disk, or a part of the range
 * is dead. MS_NOT_OURS. */
MS_API ms_status ms_backup_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                ms_error* error);

/* Returns the host address of the copy of [address, address + bytes) that the last pause of a
 * mapped tag saved. The address is that of ms_backup_view, and the contents are those of the pause.
 * Valid until the tag's next change or trim. `writable` must be 1 if the caller writes there: the
 * next pause then saves the range in any case. Errors: MS_INVALID_STATE if the tag is not mapped,
 * was paused without a backup or with one on disk, or the copy was trimmed or belongs to an earlier
 * allocation; MS_NOT_OURS. */
MS_API ms_status ms_retained_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                  ms_error* error);

/* Host memory held for all backups and what they need meanwhile, and how much more they may take
 * now: by option host_bytes, and by what the system has. */
MS_API ms_status ms_host_memory(uint64_t* held_bytes, uint64_t* available_bytes, ms_error* error);

/* The fingerprints of device memory, whoever allocated it: each range is cut into pieces of 1 MiB
 * from its own start, the last one shorter, and `rows` has one row for each piece, in order. They
 * depend on the bytes alone, not on addresses: the same contents have the same fingerprints in
 * every process. Two different pieces of equal length have the same with a chance of 2^-128, unless
 * they were made for it. Waits for the work submitted to those devices before. MS_INVALID_ARGUMENT:
 * no device memory. MS_INVALID_STATE: a range lies in a paused tag, or not in live allocations.
 * MS_DRIVER_FAILED: also where the kernel fits neither the GPU nor the driver. */
MS_API ms_status ms_fingerprint(const ms_range* ranges, size_t count, ms_digest** rows,
                                size_t* row_count, ms_error* error);

/* Returns host memory and disk space that back no paused tag to the system, and what is kept to
 * find fingerprints. Takes a tenth of a second for 8 GiB, and waits for the work of the devices. */
MS_API ms_status ms_trim(uint64_t* released_bytes, ms_error* error);

/* As ms_trim, but only for the backups of `tags`; no tags at all means every tag's backups. Errors:
 * MS_UNKNOWN_TAG. */
MS_API ms_status ms_trim_tags(const char* const* tags, size_t tag_count, uint64_t* released_bytes,
                              ms_error* error);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_H_ */
