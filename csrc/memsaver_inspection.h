/* memsaver_inspection.h: statistics, the timeline, addresses and fingerprints. No function in this
 * header changes a tag or its memory. The contract in memsaver.h applies to every function.
 */
#ifndef MEMSAVER_INSPECTION_H_
#define MEMSAVER_INSPECTION_H_

#include "memsaver.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- statistics */

/* The fields of the statistics of one tag on one device: X(type, name, meaning). The fields are
 * listed only here: ms_usage, the JSON of `memsaver top`, the rows in Python, the Prometheus
 * metrics and the fields of TagStats (build_support/usage_fields.py) are generated from this list.
 * Counters and durations are per tag and are the same in the tag's rows for all devices. Byte
 * counts are per device. A failed transition changes only `failures`. */
#define MS_USAGE_FIELDS(X)                                                                     \
  X(uint64_t, allocations,                                                                     \
    "the number of live allocations, which are torch's segments and not its tensors; a freed " \
    "segment counts until its memory is released")                                             \
  X(uint64_t, allocated_bytes, "bytes of the live allocations, each rounded up to 512")        \
  X(uint64_t, resident_bytes, "device memory in use, as counted by the driver")                \
  X(uint64_t, backup_bytes, "bytes that the next resume restores")                             \
  X(uint64_t, host_bytes,                                                                      \
    "host memory in use for backups, kept for the next pause until it is trimmed")             \
  X(uint64_t, disk_bytes,                                                                      \
    "file space in use for backups, kept for the next pause until it is trimmed")              \
  X(uint64_t, peer_bytes,                                                                      \
    "memory of another device in use for backups, kept for the next pause until trimmed")      \
  X(uint64_t, pauses, "pauses of the tag that succeeded, including swaps that paused it")      \
  X(uint64_t, resumes, "resumes of the tag that succeeded, including swaps that resumed it")   \
  X(double, last_pause_seconds, "duration of the last pause, for all tags of its call")        \
  X(double, last_resume_seconds, "duration of the last resume, for all tags of its call")      \
  X(uint64_t, failures, "pauses, resumes and swaps of the tag that failed")                    \
  X(double, pause_seconds, "total duration of the pauses")                                     \
  X(double, resume_seconds, "total duration of the resumes")                                   \
  X(uint64_t, last_paused_bytes, "device memory that the last pause released")                 \
  X(uint64_t, last_saved_bytes, "bytes that the last pause copied to the backup")              \
  X(uint64_t, last_resumed_bytes, "device memory that the last resume mapped")                 \
  X(uint64_t, last_restored_bytes, "bytes that the last resume copied from the backup")        \
  X(uint64_t, paused_bytes, "device memory that all pauses released")                          \
  X(uint64_t, saved_bytes, "bytes that all pauses copied to the backup")                       \
  X(uint64_t, resumed_bytes, "device memory that all resumes mapped")                          \
  X(uint64_t, restored_bytes, "bytes that all resumes copied from the backup")                 \
  X(uint64_t, last_unchanged_pieces,                                                           \
    "pieces of at most 1 MiB that the last pause did not copy, because their fingerprints "    \
    "matched the backup")                                                                      \
  X(uint64_t, last_unchanged_bytes, "bytes of the unchanged pieces of the last pause")         \
  X(uint64_t, unchanged_pieces, "unchanged pieces of all pauses")                              \
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

/* Returns one row for each tag and device. A tag without memory has one row, with device -1. Does
 * not wait for transitions. */
MS_API ms_status ms_stats(ms_usage** rows, size_t* row_count, ms_error* error);

/* Returns the host memory in use for all backups, including their temporary buffers. Also returns
 * the additional host memory that backups can allocate now, as limited by option host_bytes and the
 * system's available memory.
 * Errors: MS_BAD_CONFIG if the option's environment variable is invalid. */
MS_API ms_status ms_host_memory(uint64_t* held_bytes, uint64_t* available_bytes, ms_error* error);

/* Returns the number of driver objects that could not be released, and the device memory (an upper
 * bound) and pinned host memory that they use. Every transition, allocation and trim retries the
 * releases. The tags' statistics do not include this device memory, but ms_host_memory includes
 * this host memory. */
MS_API ms_status ms_deferred_releases(uint64_t* objects, uint64_t* device_bytes,
                                      uint64_t* host_bytes, ms_error* error);

/* --- the timeline of memory events */

/* The kind of a timeline event. */
typedef enum ms_event_kind {
  MS_EVENT_BASELINE = 0, /* the state of a tag on a device before its first recorded event */
  MS_EVENT_ALLOCATE = 1, /* memory was allocated */
  MS_EVENT_FREE = 2,     /* memory was freed; a free during a transition is recorded when it ends */
  MS_EVENT_BEGIN = 3,    /* a transition began; one event for each of its tags and devices */
  MS_EVENT_END = 4,      /* a transition ended; one event for each of its tags and devices */
  MS_EVENT_MEMORY = 5    /* a sample of a device's free and total memory */
} ms_event_kind;

/* The kind of a transition. */
typedef enum ms_act { MS_NO_ACT = 0, MS_PAUSE = 1, MS_RESUME = 2, MS_SWAP = 3 } ms_act;

/* The result of a transition. */
typedef enum ms_outcome {
  MS_DONE = 0,
  MS_FAILED = 1,
  MS_GIVEN_UP = 2 /* cancelled: the transition was freed without being run */
} ms_outcome;

/* One event of a timeline. Fields that do not apply to the event's kind are 0, "" or NULL. */
typedef struct ms_event {
  double time_seconds; /* on CLOCK_MONOTONIC */
  int32_t kind;        /* an ms_event_kind */
  int32_t device;      /* -1 for a tag without memory */
  const char* tag;     /* NULL for MS_EVENT_MEMORY */
  int32_t state;       /* an ms_state: the tag's state after the event */
  int32_t act;         /* an ms_act */
  int32_t outcome;     /* an ms_outcome, for MS_EVENT_END */
  int64_t thread;      /* the system's id of the thread that began the transition */
  /* the tag's memory on the device after the event; see ms_usage */
  uint64_t allocated_bytes, resident_bytes;
  uint64_t transition; /* identifies the transition in all of its events */
  /* for MS_EVENT_END with outcome MS_DONE; see ms_change */
  uint64_t device_bytes, copied_bytes;
  /* for MS_EVENT_MEMORY; see ms_device_memory */
  uint64_t free_bytes, total_bytes;
  /* for MS_EVENT_END: the text from ms_transition_set_caller, or the end of a text that is too long
   */
  char caller[256];
} ms_event;

/* Starts recording the memory events of this process's tags in a ring buffer for `capacity` events
 * of about 140 bytes each. When the buffer is full, new events replace the oldest events. A process
 * can record only one timeline at a time. Recording an allocation takes tens of nanoseconds;
 * transitions also query the devices' free memory at their start and end.
 * Errors: MS_INVALID_ARGUMENT if `capacity` is 0 or above 2^24; MS_INVALID_STATE if a timeline is
 * already being recorded. */
MS_API ms_status ms_timeline_start(size_t capacity, ms_error* error);

/* Returns the recorded events. The list starts with a baseline for each combination of a tag and a
 * device that existed before its first recorded event. The events follow in chronological order.
 * Sets `dropped`, which may be NULL, to the number of events that were replaced. Blocks other calls
 * for about a millisecond per 10,000 events.
 * Errors: MS_INVALID_STATE if no timeline is being recorded. */
MS_API ms_status ms_timeline_read(ms_event** rows, size_t* row_count, uint64_t* dropped,
                                  ms_error* error);

/* Records a sample (MS_EVENT_MEMORY) for each device on which tags have memory, with one driver
 * call per device. Does nothing if no timeline is being recorded. */
MS_API ms_status ms_timeline_sample(ms_error* error);

/* Stops recording and frees the ring buffer.
 * Errors: MS_INVALID_STATE if no timeline is being recorded. */
MS_API ms_status ms_timeline_stop(ms_error* error);

/* --- addresses and their contents */

/* Returns the live allocations of a tag in address order, on `device` or on all devices (-1).
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_ranges(const char* tag, int device, ms_range** rows, size_t* row_count,
                           ms_error* error);

/* The allocation, tag and state of an address. */
typedef struct ms_location {
  const char* tag;
  int32_t device;
  int32_t state;           /* an ms_state: the tag's state */
  uint64_t address, bytes; /* the live allocation that contains the address; 0 bytes if none */
  double since_seconds;    /* when the tag entered its state, in seconds since 1970 */
  int64_t thread; /* the system's id of the thread that began the transition to the state */
  /* the text from ms_transition_set_caller, or the end of a text that is too long */
  char caller[1024];
} ms_location;

/* Returns the allocation and the tag of an address, and the transition that led to the tag's state.
 * Makes no driver call and does not wait for transitions, so it also works after an illegal memory
 * access.
 * Errors: MS_NOT_OURS if the address is not in memory that this library reserved. */
MS_API ms_status ms_locate(const void* pointer, ms_location* location, ms_error* error);

/* The 256-bit fingerprint of a piece of memory. */
typedef struct ms_digest {
  uint64_t lanes[4];
} ms_digest;

/* Computes fingerprints of device memory, regardless of which library allocated it. Each range is
 * divided into pieces of 1 MiB, starting at the range's first byte; the last piece may be shorter.
 * `rows` receives one row for each piece, in order. A fingerprint depends only on the bytes, not on
 * addresses: equal contents have equal fingerprints in every process. Two different pieces of equal
 * length have equal fingerprints with a probability of 2^-128, unless they were constructed to
 * collide. Waits for transitions in progress on the ranges' tags and for work submitted earlier to
 * the devices.
 * Errors: MS_INVALID_ARGUMENT if a range is not device memory; MS_INVALID_STATE if a range belongs
 * to a paused tag or is not in live allocations of its tag, or if the wait would deadlock; also
 * MS_DRIVER_FAILED if the library has no device code for the GPU or driver. */
MS_API ms_status ms_fingerprint(const ms_range* ranges, size_t count, ms_digest** rows,
                                size_t* row_count, ms_error* error);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_INSPECTION_H_ */
