/* memsaver.h: device memory that can be released and restored. Each allocation belongs to a named
 * group called a tag. Pausing a tag releases its device memory but keeps its addresses reserved.
 * Resuming the tag maps memory at the same addresses and restores the contents.
 *
 * This header, memsaver_transitions.h (swaps, transitions with handles, reservations of tags),
 * memsaver_inspection.h (statistics, the timeline, addresses, fingerprints) and memsaver_sharing.h
 * (memory shared between processes) form the C interface of libmemsaver.so. Hooks and language
 * bindings include only these four headers.
 *
 * The following contract applies to every function in the four headers:
 *   - Any thread may call any function at any time: before main, during process exit and in a
 *     forked child. In a forked child, the library is inert: calls that would use the driver return
 *     MS_INVALID_STATE.
 *   - No function throws a C++ exception, raises a signal, terminates the process or writes to
 *     stdout.
 *   - A function that can fail returns an ms_status. The argument `ms_error* error` may be NULL; a
 *     function writes to it only on failure. In addition to the errors listed in its comment, every
 *     function can return MS_OUT_OF_HOST_MEMORY, and MS_INVALID_ARGUMENT if a required pointer is
 *     NULL. Functions that use the driver can also return MS_NOT_LOADED and MS_DRIVER_FAILED.
 *   - A tag's name is a non-empty UTF-8 string of any length. A returned `const char* tag` is valid
 *     until the process exits. The character U+001F is reserved for memsaver's adapters, which
 *     append it and the name of a backup policy to a tag's name: TAG\x1fhost is the part of TAG
 *     whose contents are backed up to host memory.
 *   - Names of sizes end in _bytes, and names of times end in _seconds. Addresses are device
 *     addresses, except those named `host`. The parameter `device` is a device's ordinal in the
 *     process.
 *   - A function that returns a list allocates it, and the caller frees it with ms_list_free.
 *     `row_count` may be NULL.
 *
 * When the first tag is created, the library starts a thread that sleeps until `memsaver top`, run
 * by the same user, requests statistics. If option `top` (MEMSAVER_TOP) is off, the thread is not
 * started.
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
  MS_INVALID_ARGUMENT = 1,     /* an argument that is invalid in every state */
  MS_INVALID_STATE = 2,        /* a call that is invalid in the current state */
  MS_UNKNOWN_TAG = 3,          /* no tag has this name */
  MS_OUT_OF_DEVICE_MEMORY = 4, /* ms_error has needed_bytes and free_bytes */
  MS_OUT_OF_HOST_MEMORY = 5,   /* not enough host memory for a backup or for the call */
  MS_BACKUP_FAILED = 6,        /* a backup could not be written or read */
  MS_DRIVER_FAILED = 7,        /* a driver call failed; ms_error has `call` and `cuda_error` */
  MS_NOT_LOADED = 8,           /* no usable CUDA driver */
  MS_BAD_CONFIG = 9,           /* an option or environment variable has an invalid value */
  MS_NOT_OURS = 10,            /* this library did not allocate the pointer */
  MS_INTERNAL = 11,            /* a bug in memsaver */
  MS_TAG_SHARED = 12,          /* the tag cannot be paused because other processes map its memory */
  MS_SHARING_FAILED = 13       /* the memory cannot be shared with another process */
} ms_status;

/* The state of a tag. */
typedef enum ms_state {
  MS_MAPPED = 0,   /* memory is mapped at the tag's addresses */
  MS_SAVING = 1,   /* a pause is in progress */
  MS_PAUSED = 2,   /* no memory is mapped at the tag's addresses; accesses fault */
  MS_RESTORING = 3 /* a resume is in progress */
} ms_state;

/* The backup policy of a tag, which determines where a pause saves the contents. */
typedef enum ms_backup {
  MS_BACKUP_DEFAULT = -1, /* the tag's current policy; see ms_region_enter */
  MS_BACKUP_NONE = 0,     /* contents are discarded; resumed memory reads as zero, or as
                              0xFF with option `poison` */
  MS_BACKUP_HOST = 1,     /* contents are saved in pinned host memory */
  MS_BACKUP_PAGEABLE = 2, /* contents are saved in ordinary host memory, through pinned buffers */
  MS_BACKUP_DISK = 3, /* contents are saved in a private file in the directory of option disk_dir */
  MS_BACKUP_PEER = 4  /* contents are saved in the memory of another device (options peer and
                         peer_margin_bytes), or in pinned host memory if the device has no room */
} ms_backup;

typedef struct ms_error {
  int32_t status;     /* an ms_status */
  int32_t cuda_error; /* the CUresult of `call`, or 0 if no driver call failed */
  int32_t os_error;   /* the errno of the file operation that failed, or 0 */
  int32_t device;     /* the device that is out of memory, or -1 */
  /* the bytes that the failed step needed, and the bytes that were free on the device, in host
   * memory or in the file system; 0 if unknown */
  uint64_t needed_bytes, free_bytes;
  char call[48];      /* the name of the driver call that failed, or "" */
  char tag[128];      /* the name of the affected tag, truncated to fit, or "" */
  char message[1024]; /* one paragraph that describes the failure and a remedy */
} ms_error;

typedef struct ms_range {
  uint64_t address, bytes;
} ms_range;

/* The result of a transition for one tag on one device. */
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

/* Opens the driver. Returns the driver's version (13000 for 13.0) and the name of its library
 * ("libcuda.so.1", or the value of MEMSAVER_DRIVER). Sets `simulated` to 1 for the simulated
 * driver, otherwise to 0. Does not create a CUDA context.
 * Errors: MS_NOT_LOADED if no driver was found or the driver lacks virtual memory management. */
MS_API ms_status ms_driver_info(int* version, const char** library, int* simulated,
                                ms_error* error);

/* Returns the free and total memory of `device` (-1: the calling thread's current device), as
 * reported by the driver.
 * Errors: MS_INVALID_ARGUMENT if there is no such device. */
MS_API ms_status ms_device_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes,
                                  ms_error* error);

/* Writes the PCI bus id of `device` (-1: the calling thread's current device), in the format that
 * the system and NVML use ("0000:17:00.0"). The text is truncated to `capacity` bytes and always
 * null-terminated.
 * Errors: the errors of ms_device_memory; MS_INVALID_ARGUMENT if `capacity` is 0. */
MS_API ms_status ms_device_bus_id(int device, char* text, size_t capacity, ms_error* error);

/* Returns the number of devices that the process can use. */
MS_API ms_status ms_device_count(int* count, ms_error* error);

/* Sets the option `name` to `value`, which is given as text.
 * Errors: MS_BAD_CONFIG if the option does not exist or the value is invalid. */
MS_API ms_status ms_configure(const char* name, const char* value, ms_error* error);

/* Checks whether ms_configure would accept the value, and sets nothing. The errors are those of
 * ms_configure. */
MS_API ms_status ms_check_option(const char* name, const char* value, ms_error* error);

/* Writes an option's value as text, truncated to `capacity` bytes and always null-terminated.
 * Errors: MS_BAD_CONFIG if the option does not exist or its environment variable is invalid;
 * MS_INVALID_ARGUMENT if `capacity` is 0. */
MS_API ms_status ms_option(const char* name, char* value, size_t capacity, ms_error* error);

/* Removes the oldest warning from the process's queue and writes its text, truncated to `capacity`
 * bytes and always null-terminated. Returns 1, or 0 if the queue is empty. A warning describes a
 * failure that could not be returned to a caller, for example a failed free in a hook. The queue
 * stores 64 warnings; one additional entry counts the warnings that did not fit. */
MS_API int ms_next_warning(char* text, size_t capacity);

/* Adds a warning to the queue, for a hook whose signature cannot return an error. */
MS_API void ms_warn(const char* text);

/* Frees a list that a function of this library returned. Accepts NULL. */
MS_API void ms_list_free(void* list);

/* --- regions: the tag of this thread's allocations */

/* Enters a region on this thread: until the matching ms_region_exit, the thread's allocations
 * belong to `tag`. Creates the tag if it does not exist. Regions nest. `backup` becomes the tag's
 * policy; MS_BACKUP_DEFAULT keeps the policy of an existing tag and means MS_BACKUP_NONE for a new
 * tag. Does not use the driver. Waits while a transition of the tag is in progress.
 * Errors: MS_INVALID_ARGUMENT for an empty tag name or an unknown backup policy; MS_INVALID_STATE
 * if the tag is paused or the wait would deadlock. */
MS_API ms_status ms_region_enter(const char* tag, int backup, ms_error* error);

/* Limits this thread's innermost region to the devices whose bits are set in `devices`. Bit n
 * represents device n; devices 64 and above are always included. On other devices, the thread's
 * allocations belong to no tag: ms_malloc fails with MS_INVALID_STATE, and ms_malloc_any allocates
 * ordinary device memory. Without a limit, a region applies to every device.
 * Errors: MS_INVALID_STATE outside any region. */
MS_API ms_status ms_region_limit(uint64_t devices, ms_error* error);

/* Leaves this thread's innermost region or disabled section.
 * Errors: MS_INVALID_STATE if the thread is in neither. */
MS_API ms_status ms_region_exit(ms_error* error);

/* Enters a disabled section on this thread: until the matching ms_region_exit, the thread's
 * allocations belong to no tag, not even to the process-wide tag (MEMSAVER_TAG). */
MS_API ms_status ms_disable_enter(ms_error* error);

/* Returns the tag that an allocation on this thread would now belong to, or NULL if none. */
MS_API const char* ms_region_tag(void);

/* Returns the depth of this thread's stack of regions and disabled sections. */
MS_API size_t ms_region_depth(void);

/* Binds `stream` to `tag`. Until ms_stream_unbind is called, allocations that ms_malloc_any makes
 * on the stream for threads outside any region belong to the tag. For example, a captured backward
 * pass allocates memory on autograd's threads, which are outside any region. A binding counts as an
 * open region of the tag and replaces any earlier binding of the stream. `backup` has the same
 * meaning as in ms_region_enter.
 * Errors: the errors of ms_region_enter. */
MS_API ms_status ms_stream_bind(void* stream, const char* tag, int backup, ms_error* error);

/* Ends the binding of `stream`.
 * Errors: MS_INVALID_STATE if the stream is bound to no tag. */
MS_API ms_status ms_stream_unbind(void* stream, ms_error* error);

/* --- memory */

/* Allocates `bytes` bytes of device memory for this thread's tag on `device` (-1: the calling
 * thread's current device). The address is aligned to 512 bytes, or to the driver's granularity if
 * `bytes` is at least that large. If `bytes` is 0, the address is NULL. The contents are undefined.
 * If the thread has no current context, the device's primary context becomes current, as with
 * cudaMalloc. May be called during a stream capture. Waits while a transition of the tag is in
 * progress.
 * Errors: MS_INVALID_STATE if the thread is not in a region for the device, the tag is paused, or
 * the wait would deadlock; MS_INVALID_ARGUMENT if there is no such device; MS_OUT_OF_DEVICE_MEMORY
 * if not enough device memory is available. */
MS_API ms_status ms_malloc(uint64_t bytes, int device, void** pointer, ms_error* error);

/* Frees memory that ms_malloc allocated; accepts NULL. May be called in any state of the tag. Like
 * cudaFree, waits for work on the device before the memory is released to the driver or reused.
 * Errors: MS_NOT_OURS if ms_malloc did not allocate `pointer`; MS_INVALID_ARGUMENT if it is not the
 * start of a live allocation. If either error occurs, no memory is freed. */
MS_API ms_status ms_free(void* pointer, ms_error* error);

/* Returns 1 if the address lies in memory that this library reserved, otherwise 0. Acquires no lock
 * and takes a few nanoseconds. */
MS_API int ms_owns(const void* pointer);

/* Returns 1 if ms_malloc would allocate memory for this thread, otherwise 0. It would do so if the
 * thread's innermost section is a region, or if the thread is in no section and the process-wide
 * tag (MEMSAVER_TAG) is mapped. Acquires no lock and takes a few nanoseconds. */
MS_API int ms_wants(void);

/* The counterparts of ms_malloc and ms_free for an allocator that must serve every thread. For a
 * thread outside any region, the memory belongs to the tag bound to the stream, or else to the
 * process-wide tag. If neither tag exists, ms_malloc_any allocates ordinary device memory, which no
 * pause affects. ms_free_any accepts both kinds of memory.
 * Errors: the errors of ms_malloc and ms_free, except the error for a thread outside any region. */
MS_API ms_status ms_malloc_any(uint64_t bytes, int device, void* stream, void** pointer,
                               ms_error* error);
MS_API ms_status ms_free_any(void* pointer, int device, ms_error* error);

/* ms_malloc_any and ms_free_any with the signatures that torch's CUDAPluggableAllocator expects. If
 * a call fails, the library adds a warning to the queue, and ms_torch_malloc returns NULL. */
MS_API void* ms_torch_malloc(ptrdiff_t bytes, int device, void* stream);
MS_API void ms_torch_free(void* pointer, size_t bytes, int device, void* stream);

typedef void* (*ms_torch_malloc_function)(ptrdiff_t bytes, int device, void* stream);

/* Returns an allocation function for a torch pool of `tag`. The function behaves like
 * ms_torch_malloc, but its memory belongs to `tag`, regardless of the calling thread's region. The
 * function fails while the tag is paused. Every call with the same tag returns the same function.
 * `backup` has the same meaning as in ms_region_enter.
 * Errors: the errors of ms_region_enter; also MS_INVALID_STATE if 256 tags already have a function.
 */
MS_API ms_status ms_torch_malloc_of(const char* tag, int backup, ms_torch_malloc_function* function,
                                    ms_error* error);

/* Allows devices that came into use after memory was mapped to access that memory, if the hardware
 * permits it. Allocations and resumes do the same. The function is needed because a new mapping is
 * accessible only to the devices in use at the time, and cudaDeviceEnablePeerAccess affects only
 * memory from cudaMalloc. Waits for transitions in progress.
 * Errors: MS_DRIVER_FAILED if the driver does not report which devices are in use. */
MS_API ms_status ms_refresh_peers(ms_error* error);

/* --- pauses and resumes; memsaver_transitions.h declares swaps and transitions with handles
 *
 * These functions do not call the callbacks that Python code registers with on_pause and
 * on_resume. */

/* Returns a counter that is incremented by every allocation, every free and every entry into a
 * region. */
MS_API uint64_t ms_changes(void);

/* Waiting for a tag.
 *
 * A call that needs a tag waits while a transition in progress or another thread's reservation owns
 * the tag. If the wait would deadlock, the call changes nothing and returns MS_INVALID_STATE. The
 * wait would deadlock if the calling thread has begun a transition of the tag and has neither run
 * it nor transferred it to another thread (for example, if the call is made in a signal handler or
 * a finalizer). It would also deadlock if the threads that own the tag are waiting for the calling
 * thread. These rules apply to every function that begins transitions, makes reservations or waits,
 * and to ms_region_enter, ms_stream_bind, ms_malloc, ms_malloc_any, ms_torch_malloc_of,
 * ms_backup_view, ms_retained_view, ms_fingerprint, ms_exportable and ms_importer_export. ms_free
 * never fails because of a deadlock: if necessary, the memory is released when the transition ends.
 */

/* Registers a callback for the calling thread. While a call on this thread waits for a tag, the
 * library calls `look(data)` about every 50 ms on the same thread. No lock is held during the
 * callback, so `look` may call the library's functions. If `look` returns a value other than 0, the
 * wait ends with MS_INVALID_STATE. Passing NULL removes the callback. */
MS_API void ms_while_waiting(int (*look)(void* data), void* data);

/* Pauses tags: releases the device memory of `tags` on every device, and keeps the addresses
 * reserved. An empty list of tags selects every tag. The pause succeeds for all of these tags or
 * for none. Tags that are already paused are not changed. If the tags have memory, waits for all
 * work submitted earlier to the devices.
 *
 * `backup` (an ms_backup) overrides the tags' policies for this pause. `unowned` lists memory that
 * no tensor owns; this memory is neither saved nor restored. `changes` points to the value that
 * ms_changes returned before the caller determined `unowned`. If the counter has changed since
 * then, `unowned` is ignored. If `changes` is NULL, `unowned` is assumed to be up to date. On
 * success, `rows` (which may be NULL) receives one row for each tag and device.
 *
 * Errors: MS_UNKNOWN_TAG if a tag does not exist; MS_INVALID_STATE if a region of a tag is open on
 * a thread, or the wait would deadlock; MS_TAG_SHARED if other processes map memory of a tag (see
 * memsaver_sharing.h); MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY, MS_BACKUP_FAILED or
 * MS_DRIVER_FAILED if a step fails. After an error, every tag is in the same state as before the
 * call, and no contents are lost. If the rollback also fails, the tags are paused instead, and
 * their contents are in their backups or in retained pages. The error message reports this case,
 * and a resume restores the contents. */
MS_API ms_status ms_pause(const char* const* tags, size_t tag_count, int backup,
                          const ms_range* unowned, size_t unowned_count, const uint64_t* changes,
                          ms_change** rows, size_t* row_count, ms_error* error);

/* Resumes tags: maps device memory for `tags` at the same addresses as before, on every device, and
 * restores the contents. An empty list of tags selects every tag. The resume succeeds for all of
 * these tags or for none. Tags that are already mapped are not changed. Bytes that were not saved
 * read as zero, or as 0xFF with option `poison`. `rows` has the same meaning as in ms_pause.
 *
 * Errors: MS_UNKNOWN_TAG, MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY, MS_BACKUP_FAILED and
 * MS_DRIVER_FAILED as for ms_pause; MS_INVALID_STATE if the wait would deadlock. After an error,
 * every tag is in the same state as before the call, and paused tags keep their backups. */
MS_API ms_status ms_resume(const char* const* tags, size_t tag_count, ms_change** rows,
                           size_t* row_count, ms_error* error);

/* --- the state of a tag */

/* Returns the state of a tag (an ms_state), which is the same on all its devices.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_state(const char* tag, int* state, ms_error* error);

/* Sets `pausable` to 1 if a pause of the tag would begin without waiting, otherwise to 0. A pause
 * would begin without waiting if all of these conditions are true:
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

/* Returns the host address of the backup of [address, address + bytes) in a paused tag. The host
 * address is valid until a resume of the tag begins or the range is freed. Pinned backups are
 * contiguous, so a single call can copy the range to or from a device. (The backup of an allocation
 * smaller than 1 MiB may be in two pieces.) `writable` must be 1 if the caller writes to the
 * backup; the resume restores the written bytes.
 * Errors: MS_NOT_OURS if the range is not in memory that this library reserved; MS_INVALID_ARGUMENT
 * if `bytes` is 0; MS_INVALID_STATE if the tag is not paused, the range is not within one live
 * allocation or was not saved completely (because it has no backup or overlaps `unowned`), its
 * backup is on disk or on another device, or the wait would deadlock. */
MS_API ms_status ms_backup_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                ms_error* error);

/* Returns, for a mapped tag, the host address of the copy of [address, address + bytes) that the
 * last pause saved. The address equals the result of ms_backup_view during that pause, and the
 * contents are those at the time of the pause. The address is valid until the next change or trim
 * of the tag. `writable` must be 1 if the caller writes to the copy; in that case, the next pause
 * always saves the range.
 * Errors: MS_NOT_OURS if the range is not in memory that this library reserved; MS_INVALID_ARGUMENT
 * if `bytes` is 0; MS_INVALID_STATE if the tag is not mapped, the range was not saved completely,
 * or the wait would deadlock; also MS_INVALID_STATE if the copy was trimmed, belongs to an earlier
 * allocation, or is on disk or on another device. */
MS_API ms_status ms_retained_view(uint64_t address, uint64_t bytes, int writable, void** host,
                                  ms_error* error);

/* Releases the host memory, disk space and device memory of all backups except those of paused
 * tags. Also releases the memory that is kept for computing fingerprints. Skips tags in a
 * transition. Waits for other calls that use a tag's memory, but skips the tag if the wait would
 * deadlock. Also waits for all work on the devices. Releasing 8 GiB of host memory takes about a
 * tenth of a second. */
MS_API ms_status ms_trim(uint64_t* released_bytes, ms_error* error);

/* Like ms_trim, but releases only the backups of `tags`; an empty list selects every tag.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_trim_tags(const char* const* tags, size_t tag_count, uint64_t* released_bytes,
                              ms_error* error);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_H_ */
