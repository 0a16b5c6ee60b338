/* memsaver_sharing.h: memory that several processes share. The contract of memsaver.h applies.
 *
 * The library exports a tag's memory as descriptors and records which process has it; the caller
 * sends the descriptors (SCM_RIGHTS) and messages. While a process is recorded as an importer of a
 * tag, a transition that would pause the tag waits for it, up to the option importer_seconds, then
 * fails with MS_TAG_SHARED; needed_bytes is the number of imported bytes. */
#ifndef MEMSAVER_SHARING_H_
#define MEMSAVER_SHARING_H_

#include "memsaver.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_SHARING_H_ */
