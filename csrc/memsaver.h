/* memsaver.h: the C ABI of libmemsaver.so, and the only header that hooks and bindings may include.
 *
 * Contract for every function here:
 *   - Any thread may call it at any time: before main, during process exit and in a forked child.
 *     In a forked child the library is inert: calls that would touch the driver return
 *     MS_INVALID_STATE.
 *   - It throws no C++ exception, raises no signal, never ends the process and never writes to
 *     stdout.
 *   - The creation of the first tag starts a thread, which sleeps until `memsaver top` of the same
 *     user requests the statistics. With option `top` (MEMSAVER_TOP) off, there is no thread.
 *   - A function that can fail returns an ms_status. `ms_error* error` may be NULL and is written
 *     only on failure.
 *   - Tags are UTF-8 and not empty; their length is unlimited. A returned `const char* tag` is
 *     valid until the process exits. U+001F in a tag is reserved for memsaver's adapters, which
 *     append it and the name of a backup policy to a tag: TAG\x1fhost is the part of TAG whose
 *     contents are backed up to host memory.
 *   - Sizes end in _bytes, times in _seconds. Addresses are device addresses.
 *   - The caller frees a returned list (rows, count) with ms_list_free, which accepts NULL.
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
  MS_OUT_OF_HOST_MEMORY = 5,   /* not enough host memory, for a backup or for the call */
  MS_BACKUP_FAILED = 6,        /* a backup could not be written or read */
  MS_DRIVER_FAILED = 7,        /* the call failed: see `call` and `cuda_error` */
  MS_NOT_LOADED = 8,           /* no usable CUDA driver */
  MS_BAD_CONFIG = 9,           /* an option or environment variable has an invalid value */
  MS_NOT_OURS = 10,            /* this library did not allocate the pointer */
  MS_INTERNAL = 11,            /* a bug in memsaver */
  MS_TAG_SHARED = 12,          /* a tag cannot be paused: other processes map its memory */
  MS_SHARING_FAILED = 13       /* memory cannot, or can no longer, be shared */
} ms_status;

typedef enum ms_state {
  MS_MAPPED = 0,   /* memory behind every address */
  MS_SAVING = 1,   /* a pause is in progress */
  MS_PAUSED = 2,   /* addresses only; accesses fault */
  MS_RESTORING = 3 /* a resume is in progress */
} ms_state;

typedef enum ms_backup {
  MS_BACKUP_DEFAULT = -1, /* the policy of the tag's region */
  MS_BACKUP_NONE = 0,     /* contents are discarded; resumed memory reads as zero, with option
                              `poison` as bytes 0xFF */
  MS_BACKUP_HOST = 1,     /* contents are saved in pinned host memory */
  MS_BACKUP_PAGEABLE = 2, /* contents are saved in ordinary host memory, through pinned buffers */
  MS_BACKUP_DISK = 3, /* contents are saved in a private file in the directory set by disk_dir */
  MS_BACKUP_PEER = 4  /* contents are saved in the memory of another device (options peer and
                         peer_margin_bytes), and in pinned host memory if it has no room */
} ms_backup;

typedef struct ms_error {
  int32_t status;     /* an ms_status */
  int32_t cuda_error; /* the CUresult of `call`, or 0 if no driver call failed */
  int32_t os_error;   /* the errno of the file operation that failed, or 0 */
  int32_t device;     /* the device that is out of memory, or -1 */
  uint64_t needed_bytes, free_bytes;
  char call[48];      /* the driver call that failed, or "" */
  char tag[128];      /* the tag concerned, truncated to fit, or "" */
  char message[1024]; /* what happened and what to do, one paragraph */
} ms_error;

typedef struct ms_range {
  uint64_t address, bytes;
} ms_range;

/* The 256-bit fingerprint of a piece of memory. */
typedef struct ms_digest {
  uint64_t lanes[4];
} ms_digest;

/* A transition's result for one tag on one device. */
typedef struct ms_change {
  const char* tag;
  int32_t device;
  int32_t changed;       /* 0: the tag was already in the requested state */
  uint64_t device_bytes; /* device memory released or mapped */
  uint64_t copied_bytes; /* bytes moved to or from the backup */
} ms_change;

/* The statistics of one tag on one device: X(type, name, meaning). This is the only list of the
 * fields: ms_usage, the JSON of `memsaver top`, Python's rows and the fields of TagStats
 * (build_support/usage_fields.py) are generated from it. Counters and durations are per tag, and
 * equal in the tag's rows for all devices; byte counts are per device. A failed transition changes
 * only `failures`. */
#define MS_USAGE_FIELDS(X)                                                                   \
  X(uint64_t, allocations,                                                                   \
    "live allocations: torch's segments, not its tensors; a freed one counts until its "     \
    "memory is released")                                                                    \
  X(uint64_t, allocated_bytes, "bytes of the live allocations, each rounded up to 512")      \
  X(uint64_t, resident_bytes, "device memory in use, as counted by the driver")              \
  X(uint64_t, backup_bytes, "bytes that the next resume restores")                           \
  X(uint64_t, host_bytes,                                                                    \
    "host memory in use for backups, kept for the next pause until it is trimmed")           \
  X(uint64_t, disk_bytes,                                                                    \
    "file space in use for backups, kept for the next pause until it is trimmed")            \
  X(uint64_t, peer_bytes,                                                                    \
    "memory of another device in use for backups, kept for the next pause until trimmed")    \
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

/* The current statistics of one tag on one device. */
typedef struct ms_usage {
  const char* tag;
  int32_t device; /* -1 if the tag has no memory */
  int32_t state;  /* an ms_state */
  int32_t backup; /* an ms_backup: the policy of the tag */
#define MS_USAGE_MEMBER(type, name, meaning) type name;
  MS_USAGE_FIELDS(MS_USAGE_MEMBER)
#undef MS_USAGE_MEMBER
} ms_usage;

/* The kind of a timeline event. */
typedef enum ms_event_kind {
  MS_EVENT_BASELINE = 0, /* the state of a tag on a device before its first recorded event */
  MS_EVENT_ALLOCATE = 1,
  MS_EVENT_FREE = 2,  /* freed memory was released; frees in a transition take effect at its end */
  MS_EVENT_BEGIN = 3, /* a transition began; one event for each of its tags and devices */
  MS_EVENT_END = 4,   /* a transition ended; one event for each of its tags and devices */
  MS_EVENT_MEMORY = 5 /* a sample of the driver's free and total memory of a device */
} ms_event_kind;

typedef enum ms_act { MS_NO_ACT = 0, MS_PAUSE = 1, MS_RESUME = 2, MS_SWAP = 3 } ms_act;

typedef enum ms_outcome {
  MS_DONE = 0,
  MS_FAILED = 1,
  MS_GIVEN_UP = 2 /* the transition was freed without being run */
} ms_outcome;

/* One event of a timeline. Fields that do not apply to the event's kind are 0, "" or NULL. */
typedef struct ms_event {
  double time_seconds; /* on CLOCK_MONOTONIC */
  int32_t kind;        /* an ms_event_kind */
  int32_t device;      /* -1 for a tag without memory */
  const char* tag;     /* NULL for MS_EVENT_MEMORY */
  int32_t state;       /* an ms_state: the tag's state after the event */
  int32_t act;         /* an ms_act: the kind of transition */
  int32_t outcome;     /* an ms_outcome, for MS_EVENT_END */
  int64_t thread;      /* the system's id of the thread that began the transition */
                       /* the tag's memory on the device, after the event */
  uint64_t allocated_bytes, resident_bytes;
  uint64_t transition; /* identifies the transition in all of its events */
                       /* for MS_EVENT_END with MS_DONE: see ms_change */
  uint64_t device_bytes, copied_bytes;
  uint64_t free_bytes, total_bytes; /* for MS_EVENT_MEMORY */
  /* for MS_EVENT_END: the caller of the transition, as in ms_location; only the end of a
   * long text */
  char caller[256];
} ms_event;

/* The allocation, tag and state of an address. */
typedef struct ms_location {
  const char* tag;
  int32_t device;
  int32_t state;           /* an ms_state: the tag's state */
  uint64_t address, bytes; /* the live allocation that contains the address, or 0 bytes */
  double since_seconds;    /* when the tag entered this state, in seconds since 1970 */
  int64_t thread;          /* the system's id of the thread that began that transition */
  /* the text of ms_transition_set_caller for that transition; only the end of a long text */
  char caller[1024];
} ms_location;

/* --- the library */

/* Returns "major.minor.patch". Does not use the driver. */
MS_API const char* ms_version(void);

/* Opens the driver. Returns its version (13000 for 13.0) and the name of its library
 * ("libcuda.so.1", or the value of MEMSAVER_DRIVER). `simulated` is 1 for the simulated driver.
 * Creates no CUDA context.
 * Errors: MS_NOT_LOADED if there is no driver, or it has no virtual memory management; the message
 * contains advice. */
MS_API ms_status ms_driver_info(int* version, const char** library, int* simulated,
                                ms_error* error);

/* Returns the free and the total bytes of a device, as reported by the driver. */
MS_API ms_status ms_device_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes,
                                  ms_error* error);

/* Writes the bus id of a device, which the system and NVML use ("0000:17:00.0"), truncated to
 * `capacity` and terminated. */
MS_API ms_status ms_device_bus_id(int device, char* text, size_t capacity, ms_error* error);

/* Returns the number of devices. */
MS_API ms_status ms_device_count(int* count, ms_error* error);

/* Sets the option `name` of the options table to `value`, as text.
 * Errors: MS_BAD_CONFIG, with the names of the known options. */
MS_API ms_status ms_configure(const char* name, const char* value, ms_error* error);

/* Writes an option's value as text, truncated to `capacity` bytes and always terminated. */
MS_API ms_status ms_option(const char* name, char* value, size_t capacity, ms_error* error);

/* Removes the oldest failure that could not be returned to a caller (for example, a failed free in
 * a hook) from the queue and writes its text, truncated to `capacity` and terminated. Returns 1, or
 * 0 if the queue is empty. The queue keeps the first 64 failures. */
MS_API int ms_next_warning(char* text, size_t capacity);

/* Adds a failure to that queue. For hooks whose signatures cannot return a reason. */
MS_API void ms_warn(const char* text);

/* Frees a list that a function of this library returned. */
MS_API void ms_list_free(void* list);

/* --- regions: the tag of this thread's allocations */

/* Enters a region on this thread. `backup` becomes the tag's policy; MS_BACKUP_DEFAULT keeps an
 * existing tag's policy and means MS_BACKUP_NONE for a new one. Does not use the driver. Waits
 * while a transition of the tag is in progress.
 * Errors: MS_INVALID_ARGUMENT for an empty tag or an unknown backup; MS_INVALID_STATE if the tag is
 * paused. */
MS_API ms_status ms_region_enter(const char* tag, int backup, ms_error* error);

/* Limits this thread's innermost region to some devices (bit n: device n, the first 64). On other
 * devices the thread's allocations belong to no tag: ms_malloc fails with MS_INVALID_STATE, and
 * ms_malloc_any allocates plain memory. Without a limit a region applies to every device.
 * Errors: MS_INVALID_STATE outside any region. */
MS_API ms_status ms_region_limit(uint64_t devices, ms_error* error);

/* Leaves the innermost region or disabled section of this thread.
 * Errors: MS_INVALID_STATE if there is none. */
MS_API ms_status ms_region_exit(ms_error* error);

/* Until the matching ms_region_exit, this thread's allocations belong to no tag, not even to the
 * process-wide tag (MEMSAVER_TAG). */
MS_API ms_status ms_disable_enter(ms_error* error);

/* Returns the tag that an allocation of this thread would belong to now, or NULL. */
MS_API const char* ms_region_tag(void);

/* Returns the depth of this thread's stack of regions and disabled sections. */
MS_API size_t ms_region_depth(void);

/* Binds `stream` to `tag` until ms_stream_unbind: allocations that ms_malloc_any makes on the
 * stream for threads outside any region belong to the tag. For example, a captured backward pass
 * allocates on autograd's threads. A binding counts as an open region. */
MS_API ms_status ms_stream_bind(void* stream, const char* tag, int backup, ms_error* error);
MS_API ms_status ms_stream_unbind(void* stream, ms_error* error);

/* --- memory */

/* Allocates `bytes` of device memory for this thread's tag on `device` (-1: the calling thread's
 * current device). The address is aligned to 512 bytes, or to the driver's granularity if `bytes`
 * reaches it; it is NULL for 0 bytes. Contents are undefined. A thread without a current context
 * gets the device's primary context, as with cudaMalloc. Legal inside a stream capture. Waits while
 * a transition of the tag is in progress.
 * Errors: MS_INVALID_STATE if the thread is in no region or the tag is paused;
 * MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_malloc(uint64_t bytes, int device, void** pointer, ms_error* error);

/* Frees memory that ms_malloc allocated. Legal in every state of the tag. Like cudaFree, waits for
 * the device's work before memory is released to the driver or reused.
 * Errors: MS_NOT_OURS, and nothing is freed, if ms_malloc did not allocate `pointer`. */
MS_API ms_status ms_free(void* pointer, ms_error* error);

/* Returns 1 if the address lies in memory that this library reserved. Takes no lock, and costs a
 * few nanoseconds. */
MS_API int ms_owns(const void* pointer);

/* Returns 1 if ms_malloc would allocate for this thread: the thread is in a region, or the process
 * has a tag (MEMSAVER_TAG) that is mapped, and no disabled section is open. Takes no lock, and
 * costs a few nanoseconds. */
MS_API int ms_wants(void);

/* The counterparts of ms_malloc and ms_free for an allocator that must serve every thread. Outside
 * any region, the memory belongs to the tag bound to the stream; otherwise it is plain device
 * memory, which no pause affects. ms_free_any accepts both kinds. */
MS_API ms_status ms_malloc_any(uint64_t bytes, int device, void* stream, void** pointer,
                               ms_error* error);
MS_API ms_status ms_free_any(void* pointer, int device, ms_error* error);

/* ms_malloc_any and ms_free_any with the signatures that torch's CUDAPluggableAllocator expects. A
 * failure returns NULL and adds a warning. */
MS_API void* ms_torch_malloc(ptrdiff_t bytes, int device, void* stream);
MS_API void ms_torch_free(void* pointer, size_t bytes, int device, void* stream);

/* Returns a function like ms_torch_malloc whose memory belongs to `tag`, regardless of the calling
 * thread's region: for a torch pool of that tag. The function returns NULL while the tag is paused.
 * Every call with the same tag returns the same function. `backup` is as in ms_region_enter.
 * Errors: those of ms_region_enter; MS_INVALID_STATE also if 256 tags already have a function. */
typedef void* (*ms_torch_malloc_function)(ptrdiff_t bytes, int device, void* stream);
MS_API ms_status ms_torch_malloc_of(const char* tag, int backup, ms_torch_malloc_function* function,
                                    ms_error* error);

/* Allows devices that came into use after memory was mapped to access that memory, if the hardware
 * permits it. Memory is mapped for the devices in use when the mapping is made; unlike cudaMalloc's
 * memory it is not affected by cudaDeviceEnablePeerAccess. Allocations and resumes also do this.
 * Waits for transitions in progress.
 * Errors: MS_DRIVER_FAILED if the driver does not report which devices are in use. */
MS_API ms_status ms_refresh_peers(ms_error* error);

/* --- transitions
 *
 * The functions below call none of the callbacks that Python's on_pause and on_resume register. */

/* Returns a counter that every allocation, free and opened region increments. */
MS_API uint64_t ms_changes(void);

/* Waiting for a tag.
 *
 * A call that needs a tag waits while a transition in progress or another thread's reservation owns
 * the tag. If the wait would deadlock, the call changes nothing and returns MS_INVALID_STATE. The
 * wait would deadlock if the calling thread has begun a transition of the tag and has neither run
 * it nor handed it over (for example in a signal handler or a finalizer), or if the threads that
 * own the tag wait for this thread in turn. This applies to every function below that begins
 * transitions, reserves or waits, and to ms_region_enter, ms_stream_bind, ms_malloc, ms_malloc_any,
 * ms_backup_view and ms_retained_view. ms_free is never rejected: if necessary, the end of the
 * transition releases the memory.
 *
 * ms_while_waiting: sets the calling thread's callback. While a call on this thread waits for a
 * tag, the library calls `look(data)` about every 50 ms on the same thread. The library holds no
 * lock during the callback, so `look` may call the library. A result other than 0 ends the wait
 * with MS_INVALID_STATE. NULL removes the callback. */
MS_API void ms_while_waiting(int (*look)(void* data), void* data);

/* The right to begin transitions of some tags, for work that must run together with a transition.
 *
 * Only the thread that owns a reservation can begin transitions of its tags, or make further,
 * nested reservations of them. Other threads wait, but may allocate in the tags. */
typedef struct ms_reservation ms_reservation;

/* Reserves `tags` for the calling thread; an empty list means every tag. Waits until no other
 * thread owns a reservation or a transition of any of them. Errors: MS_UNKNOWN_TAG;
 * MS_INVALID_STATE if the wait would deadlock. */
MS_API ms_status ms_reserve(const char* const* tags, size_t tag_count, ms_reservation** reservation,
                            ms_error* error);

/* Hands the reservation, and transitions of its tags that this thread has begun, over to another
 * thread, which must call ms_reservation_take_over. Afterwards this thread's calls wait for them.
 * Does nothing if the other thread has already taken the reservation over. */
MS_API ms_status ms_reservation_hand_over(ms_reservation* reservation, ms_error* error);
MS_API ms_status ms_reservation_take_over(ms_reservation* reservation, ms_error* error);

/* Releases the reservation. Further calls do nothing. Any thread. */
MS_API ms_status ms_reservation_release(ms_reservation* reservation, ms_error* error);

/* Waits at most `seconds` (negative: without a limit) for the release of the reservation. Sets
 * `is_over` to 1 if it was released, otherwise to 0. Any thread. Errors: MS_INVALID_STATE if this
 * thread owns the reservation, or its owner waits for this thread. */
MS_API ms_status ms_reservation_wait(ms_reservation* reservation, double seconds, int* is_over,
                                     ms_error* error);

/* Releases and frees the reservation. No other thread may be using it. Accepts NULL. */
MS_API void ms_reservation_free(ms_reservation* reservation);

/* A transition in progress: a pause, a resume, or both. It belongs to the thread that began it,
 * then to the thread that runs it. */
typedef struct ms_transition ms_transition;

/* Passed as `out_count` or `into_count`: selects every tag. */
#define MS_ALL_TAGS ((size_t)-1)

/* Begins a transition that releases the device memory of the tags `out` and maps that of the tags
 * `into` again, behind the same addresses, on every device; all or nothing. Either may be empty,
 * but not both: without `into` it is a pause, without `out` a resume, with both a swap, which
 * copies in both directions at once and maps pages of `out` for `into` without releasing them. Tags
 * of `out` that are paused and tags of `into` that are mapped are left as they are.
 *
 * After this call the transition owns the tags, and conflicting calls wait (see "Waiting for a
 * tag"), so the transition must be run or freed.
 *
 * `backup` overrides the policies of the tags of `out` for this call. Without `out`, MS_BACKUP_NONE
 * restores nothing: all bytes read as if they had not been saved. The bytes of `dead`, which no
 * tensor owns, are neither saved nor restored. `changes` is the result of ms_changes from before
 * `dead` was determined: if the counter has changed since, everything is saved (NULL: `dead`
 * is up to date). Bytes that were not saved read as zero after the resume, with option `poison` as
 * 0xFF.
 *
 * Errors: MS_UNKNOWN_TAG; MS_INVALID_STATE if a region of a tag of `out` is open on a thread, or
 * waiting for a tag would deadlock; MS_INVALID_ARGUMENT if a tag is in both, or no tag is given.
 *
 * If `out` has memory, running the transition waits for all work submitted earlier to the devices.
 * Errors of the run: MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY, MS_BACKUP_FAILED,
 * MS_DRIVER_FAILED. After an error every tag of `out` is mapped with its bytes, and every tag of
 * `into` is paused with its backup and uses no device memory; the same call may be made again.
 * There are two exceptions:
 *   - If `into` has tags, the contents of tags of `out` without a backup may be lost.
 *   - If the rollback also fails, the tags of `out` are paused, and their contents are in their
 *     backups or in retained pages; the error message reports this, and a resume restores them. */
MS_API ms_status ms_transition_begin(const char* const* out, size_t out_count,
                                     const char* const* into, size_t into_count, int backup,
                                     const ms_range* dead, size_t dead_count,
                                     const uint64_t* changes, ms_transition** transition,
                                     ms_error* error);

/* ms_transition_begin without `into`; an empty list of tags means every tag. */
MS_API ms_status ms_pause_begin(const char* const* tags, size_t tag_count, int backup,
                                const ms_range* dead, size_t dead_count, const uint64_t* changes,
                                ms_transition** transition, ms_error* error);

/* ms_transition_begin without `out`; an empty list of tags means every tag. */
MS_API ms_status ms_resume_begin(const char* const* tags, size_t tag_count,
                                 ms_transition** transition, ms_error* error);

/* ms_transition_begin with both; MS_INVALID_ARGUMENT if either is empty. */
MS_API ms_status ms_swap_begin(const char* const* out, size_t out_count, const char* const* into,
                               size_t into_count, int backup, const ms_range* dead,
                               size_t dead_count, const uint64_t* changes,
                               ms_transition** transition, ms_error* error);

/* Runs the transition, once, on any thread, and releases the tags. On success `rows` has one row
 * for each tag and device, those of `out` first. */
MS_API ms_status ms_transition_run(ms_transition* transition, ms_change** rows, size_t* row_count,
                                   ms_error* error);

/* Hands the transition over to another thread, which must run it. Afterwards the calls of the
 * thread that began it wait for it. Errors: MS_INVALID_STATE if the transition was run. */
MS_API ms_status ms_transition_hand_over(ms_transition* transition, ms_error* error);

/* Sets the description of the transition's caller (for example, a place in a program), for
 * ms_locate. Call only on the thread that begins or runs the transition, before the run. Errors:
 * MS_INVALID_STATE if the transition was run. */
MS_API ms_status ms_transition_set_caller(ms_transition* transition, const char* caller,
                                          ms_error* error);

/* Reports the bytes copied so far, and the total bytes to copy. The latter grow while the
 * transition starts, and shrink as pieces are found unchanged. Any thread, until the transition is
 * freed. */
MS_API void ms_transition_progress(const ms_transition* transition, uint64_t* done_bytes,
                                   uint64_t* total_bytes);

/* Makes work that is submitted to `stream` (a CUstream) after this call wait for the transition.
 * For a resume, returns when all copies are queued on the devices, otherwise when the transition is
 * over. Any thread. Errors: MS_INVALID_STATE if the transition failed, or the wait would deadlock,
 * because this thread owns the transition and has not run it, or its owner waits for this thread.
 */
MS_API ms_status ms_transition_wait_stream(ms_transition* transition, void* stream,
                                           ms_error* error);

/* Like ms_transition_wait_stream, but work waits only for the contents of some addresses: for the
 * copies of a resume into `ranges`, and those queued before them. If an address does not
 * belong to the resume, it waits for all copies. Without ranges, it waits for none, and the call
 * only returns later. `stream` points to the CUstream; if it is NULL, the calling thread waits.
 * Errors: see ms_transition_wait_stream; MS_DRIVER_FAILED if a copy fails during the wait of this
 * thread. */
MS_API ms_status ms_transition_wait_ranges(ms_transition* transition, const ms_range* ranges,
                                           size_t range_count, void* const* stream,
                                           ms_error* error);

/* Frees a transition that is not running. If it has not run, it is cancelled: no tag changes.
 * Accepts NULL. */
MS_API void ms_transition_free(ms_transition* transition);

/* These begin, run and free a transition. */
MS_API ms_status ms_pause(const char* const* tags, size_t tag_count, int backup,
                          const ms_range* dead, size_t dead_count, const uint64_t* changes,
                          ms_change** rows, size_t* row_count, ms_error* error);
MS_API ms_status ms_resume(const char* const* tags, size_t tag_count, ms_change** rows,
                           size_t* row_count, ms_error* error);

/* --- state and statistics of tags */

/* Returns the state of a tag, which is the same on all its devices. */
MS_API ms_status ms_tag_state(const char* tag, int* state, ms_error* error);

/* Sets `pausable` to 1 if a pause of the tag would begin without waiting: the tag is mapped, no
 * region of it is open, and no transition or other thread's reservation owns it.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_pausable(const char* tag, int* pausable, ms_error* error);

/* Returns the backup policy of a tag. */
MS_API ms_status ms_tag_backup(const char* tag, int* backup, ms_error* error);

/* Returns one row for each tag and device. A tag without memory has one row with device -1. */
MS_API ms_status ms_stats(ms_usage** rows, size_t* row_count, ms_error* error);

/* --- the timeline of memory events */

/* Starts recording the memory events of this process's tags in a ring of `capacity` events of about
 * 140 bytes each. New events replace the oldest. A process records one timeline at a time.
 *
 * Cost: a load and a branch per allocation while nothing is recorded, otherwise tens of
 * nanoseconds. While a timeline is recorded, transitions query the driver's free memory at their
 * start and end.
 * Errors: MS_INVALID_ARGUMENT if `capacity` is 0 or above 2^24; MS_INVALID_STATE if a timeline is
 * being recorded. */
MS_API ms_status ms_timeline_start(size_t capacity, ms_error* error);

/* Returns the recorded events: first a baseline for each tag and device that existed before its
 * first event, then the events in chronological order. `dropped` counts the older events that were
 * replaced. Blocks other calls for about a millisecond for each 10,000 events.
 * Errors: MS_INVALID_STATE if nothing is being recorded. */
MS_API ms_status ms_timeline_read(ms_event** rows, size_t* row_count, uint64_t* dropped,
                                  ms_error* error);

/* Records a sample of the driver's free memory for each device on which tags have memory, with one
 * driver call per device. Does nothing if nothing is being recorded. */
MS_API ms_status ms_timeline_sample(ms_error* error);

/* Stops recording and frees the ring.
 * Errors: MS_INVALID_STATE if nothing is being recorded. */
MS_API ms_status ms_timeline_stop(ms_error* error);

/* --- addresses and their contents */

/* Returns the live allocations of a tag in address order, on `device` or on all devices (-1). */
MS_API ms_status ms_ranges(const char* tag, int device, ms_range** rows, size_t* row_count,
                           ms_error* error);

/* Returns the allocation and the tag of an address, and the transition that brought the tag into
 * its state. Makes no driver call and waits for no transition, so it also works after an illegal
 * access.
 * Errors: MS_NOT_OURS. */
MS_API ms_status ms_locate(const void* pointer, ms_location* location, ms_error* error);

/* Computes fingerprints of device memory, whichever library allocated it. Each range is cut into
 * pieces of 1 MiB from its own start, the last one shorter, and `rows` has one row for each piece,
 * in order. A fingerprint depends only on the bytes, not on addresses: the same contents have the
 * same fingerprints in every process. Two different pieces of equal length have equal fingerprints
 * with a probability of 2^-128, unless they were constructed to collide. Waits for work submitted
 * earlier to those devices.
 * Errors: MS_INVALID_ARGUMENT if a range is not device memory; MS_INVALID_STATE if a range lies in
 * a paused tag, or outside live allocations; MS_DRIVER_FAILED also if no kernel image supports the
 * GPU or driver. */
MS_API ms_status ms_fingerprint(const ms_range* ranges, size_t count, ms_digest** rows,
                                size_t* row_count, ms_error* error);

/* --- memory that several processes share
 *
 * The library exports a tag's memory as descriptors and records which process has it; the caller
 * sends the descriptors (SCM_RIGHTS) and messages. While a process is recorded as an importer of a
 * tag, a transition that would pause the tag waits for it, up to the option importer_seconds, then
 * fails with MS_TAG_SHARED; needed_bytes is the number of imported bytes. */

/* An extent: one piece of a tag's physical memory. */
typedef struct ms_exported {
  uint64_t address, bytes;
  uint64_t span_address, span_bytes; /* the reserved range that contains the extent */
  uint64_t id; /* unique in the process, and new for memory that a resume or a swap maps */
  int32_t device;
  int32_t descriptor; /* the caller closes it; -1 if none was requested */
} ms_exported;

/* The memory of one tag that one process has imported. */
typedef struct ms_import {
  const char* tag;
  int64_t pid;
  uint64_t bytes;
} ms_import;

/* Makes the tag's new memory exportable; without this call, no memory is exportable. Memory that
 * the tag already has becomes exportable when a resume replaces it. Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_make_shareable(const char* tag, ms_error* error);

/* Returns the extents under a range of a live allocation, without descriptors, in address order.
 * Does not wait. Errors: MS_NOT_OURS; MS_SHARING_FAILED if the tag is not mapped, the range is
 * outside live allocations, or its memory is not exportable. */
MS_API ms_status ms_exportable(uint64_t address, uint64_t bytes, ms_exported** rows,
                               size_t* row_count, ms_error* error);

/* A process that imports memory of this process. One call at a time may use an object. */
typedef struct ms_importer ms_importer;
MS_API ms_status ms_importer_open(int64_t pid, ms_importer** importer, ms_error* error);

/* Exports the extents under ranges of one tag on one device, except those that the process already
 * has, at most `most` of them, and records that it has them; all or none. If there are more, the
 * next call exports them. The caller closes the descriptors. Waits while a transition of the tag is
 * in progress.
 * Errors: those of ms_exportable; MS_INVALID_ARGUMENT if there is no range, or ranges of several
 * tags or devices; MS_DRIVER_FAILED; MS_INVALID_STATE if the wait would deadlock. */
MS_API ms_status ms_importer_export(ms_importer* importer, const ms_range* ranges, size_t count,
                                    size_t most, ms_exported** rows, size_t* row_count,
                                    ms_error* error);

/* Records that the process has released these extents. Unknown ids are ignored. */
MS_API ms_status ms_importer_released(ms_importer* importer, const uint64_t* ids, size_t count,
                                      ms_error* error);

/* Ends the record of a process that has released everything, or has ended. Accepts NULL. */
MS_API void ms_importer_close(ms_importer* importer);

/* Returns one row for each process and tag with imported memory. */
MS_API ms_status ms_importers(ms_import** rows, size_t* row_count, ms_error* error);

/* Returns an eventfd, the same at every call, that becomes readable when importers should release
 * memory that no tensor uses: a pause waits for them, or the memory was freed. The caller reads it,
 * but does not close it. Errors: MS_OUT_OF_HOST_MEMORY. */
MS_API ms_status ms_release_requests(int* descriptor, ms_error* error);

/* Reserved addresses in this process for memory of another process; their size is that of the range
 * reserved there. One call at a time may use an object. */
typedef struct ms_foreign_span ms_foreign_span;

/* An extent of another process; the caller owns `descriptor`. */
typedef struct ms_foreign_extent {
  uint64_t offset, bytes; /* its place in the span */
  int32_t descriptor;
} ms_foreign_extent;

/* Reserves `bytes` of addresses on `device` (-1: the calling thread's current device). Errors:
 * MS_INVALID_ARGUMENT, MS_DRIVER_FAILED. */
MS_API ms_status ms_foreign_span_reserve(int device, uint64_t bytes, ms_foreign_span** span,
                                         uint64_t* address, ms_error* error);

/* Imports and maps extents, all or none, for the device and its peers in use. Errors:
 * MS_INVALID_ARGUMENT if an extent is outside the span or overlaps another; MS_DRIVER_FAILED,
 * MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_foreign_span_map(ms_foreign_span* span, const ms_foreign_extent* extents,
                                     size_t count, ms_error* error);

/* Waits for work on the devices, then unmaps and releases the extents at these offsets; without
 * offsets it only waits. Ignores other offsets. Errors: MS_DRIVER_FAILED; the call may be
 * repeated. */
MS_API ms_status ms_foreign_span_unmap(ms_foreign_span* span, const uint64_t* offsets, size_t count,
                                       ms_error* error);

/* Waits for work on the devices, then releases everything. Accepts NULL. */
MS_API void ms_foreign_span_free(ms_foreign_span* span);

/* --- backups and the memory that they use */

/* Returns the host address of the backup of [address, address + bytes) in a paused tag. Valid until
 * a resume of the tag begins or the range is freed. Pinned backups are contiguous, so that one call
 * copies the range to or from a device (a block of less than 1 MiB may be in two pieces).
 * `writable` must be 1 if the caller writes to the backup; the resume restores the written bytes.
 * Errors: MS_INVALID_ARGUMENT if `bytes` is 0; MS_INVALID_STATE if the tag is not paused, was
 * paused without a backup or with one on disk or on another device, or a part of the range is dead;
 * MS_NOT_OURS. */
MS_API ms_status ms_backup_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                ms_error* error);

/* Returns the host address of the copy of [address, address + bytes) that the last pause of a
 * mapped tag saved. The address is that of ms_backup_view, and the contents are those of the pause.
 * Valid until the tag's next change or trim. `writable` must be 1 if the caller writes to the copy:
 * the next pause then always saves the range. Errors: MS_INVALID_ARGUMENT if `bytes` is 0;
 * MS_INVALID_STATE if the tag is not mapped, was paused without a backup or with one on disk or on
 * another device, or the copy was trimmed or belongs to an earlier allocation; MS_NOT_OURS. */
MS_API ms_status ms_retained_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                  ms_error* error);

/* Returns the host memory in use for all backups, including their temporary buffers, and how much
 * more they may allocate now, within option host_bytes and the system's available memory. */
MS_API ms_status ms_host_memory(uint64_t* held_bytes, uint64_t* available_bytes, ms_error* error);

/* Reports driver objects that could not be released; every transition, allocation and trim retries
 * the release. Returns their number, and their device memory (an upper bound) and pinned host
 * memory in bytes. No tag counts this device memory; ms_host_memory counts the host memory. */
MS_API ms_status ms_deferred_releases(uint64_t* objects, uint64_t* device_bytes,
                                      uint64_t* host_bytes, ms_error* error);

/* Releases the host memory, disk space and device memory of backups, except those of paused tags,
 * and the memory kept for computing fingerprints. Takes a tenth of a second for 8 GiB on the host.
 * Waits for all work on the devices. */
MS_API ms_status ms_trim(uint64_t* released_bytes, ms_error* error);

/* Like ms_trim, but only for the backups of `tags`; an empty list means every tag's backups.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_trim_tags(const char* const* tags, size_t tag_count, uint64_t* released_bytes,
                              ms_error* error);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_H_ */
