/* memsaver_sharing.h: memory of tags that several processes map. The contract in memsaver.h
 * applies.
 *
 * The process that allocated the memory exports it as file descriptors (ms_importer_export), which
 * the caller sends to the other process, the importer (SCM_RIGHTS). The importer maps them
 * (ms_foreign_span_map). After it has unmapped them, it sends their ids back, and the first process
 * reports the ids to the library (ms_importer_released).
 *
 * The library records the memory that each process has imported. A transition that would pause a
 * tag waits until no process has imported memory of it, for at most the time of option
 * importer_seconds, then fails with MS_TAG_SHARED; `needed_bytes` of the error is the number of
 * imported bytes.
 */
#ifndef MEMSAVER_SHARING_H_
#define MEMSAVER_SHARING_H_

#include "memsaver.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- the process that exports its memory */

/* An extent: one piece of a tag's physical memory. */
typedef struct ms_exported {
  uint64_t address, bytes;
  uint64_t span_address, span_bytes; /* the reserved range that contains the extent */
  uint64_t id; /* unique in the process; memory that a resume or a swap maps gets new ids */
  int32_t device;
  int32_t descriptor; /* the caller closes it; -1 from ms_exportable */
} ms_exported;

/* The memory of one tag that one process has imported. */
typedef struct ms_import {
  const char* tag;
  int64_t pid;
  uint64_t bytes;
} ms_import;

/* Makes the memory that the tag allocates from now on exportable; without this call, none of its
 * memory is exportable. Memory that the tag already has becomes exportable when a pause and a
 * resume replace it. Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_make_shareable(const char* tag, ms_error* error);

/* Returns the extents that back a range of a live allocation, without descriptors, in address
 * order. Does not wait. `rows` is required.
 * Errors: MS_NOT_OURS; MS_SHARING_FAILED if the tag is not mapped, the range is not in one live
 * allocation, or its memory is not exportable. */
MS_API ms_status ms_exportable(uint64_t address, uint64_t bytes, ms_exported** rows,
                               size_t* row_count, ms_error* error);

/* The record of a process that imports memory of this process. One call at a time may use an
 * object. */
typedef struct ms_importer ms_importer;

/* Opens the record of the process `pid`, which has imported nothing yet. */
MS_API ms_status ms_importer_open(int64_t pid, ms_importer** importer, ms_error* error);

/* Exports the extents that back ranges of one tag on one device, and records that the process has
 * imported them; all or none. Skips extents that the process has already imported, and exports at
 * most `most`; a further call exports the rest. The caller closes the descriptors. Waits while a
 * transition of the tag is in progress. `rows` is required.
 * Errors: those of ms_exportable; MS_INVALID_ARGUMENT if there is no range, or the ranges belong
 * to several tags or devices; MS_INVALID_STATE if the wait would deadlock. */
MS_API ms_status ms_importer_export(ms_importer* importer, const ms_range* ranges, size_t count,
                                    size_t most, ms_exported** rows, size_t* row_count,
                                    ms_error* error);

/* Records that the process has released the extents with these ids. Ignores unknown ids. */
MS_API ms_status ms_importer_released(ms_importer* importer, const uint64_t* ids, size_t count,
                                      ms_error* error);

/* Closes the record of a process that has released everything, or has ended. Accepts NULL. */
MS_API void ms_importer_close(ms_importer* importer);

/* Returns one row for each process and tag with imported memory. */
MS_API ms_status ms_importers(ms_import** rows, size_t* row_count, ms_error* error);

/* Returns an eventfd, the same at every call, that becomes readable when importers should release
 * memory that they do not use: a pause waits for them, or exported memory was freed. The caller
 * reads it, but does not close it.
 * Errors: MS_OUT_OF_HOST_MEMORY if no descriptor is left. */
MS_API ms_status ms_release_requests(int* descriptor, ms_error* error);

/* --- the process that imports memory */

/* Reserved addresses for memory of another process. They mirror that process's range (span_bytes):
 * each extent has the same offset in both. One call at a time may use an object. */
typedef struct ms_foreign_span ms_foreign_span;

/* An extent that another process has exported. */
typedef struct ms_foreign_extent {
  uint64_t offset, bytes; /* its place in the span: offset is address - span_address */
  int32_t descriptor;     /* the caller closes it after the call */
} ms_foreign_extent;

/* Reserves `bytes` of addresses, rounded up to the driver's granularity, for memory of `device`
 * (-1: the calling thread's current device).
 * Errors: MS_INVALID_ARGUMENT if `bytes` is 0 or there is no such device; MS_OUT_OF_DEVICE_MEMORY.
 */
MS_API ms_status ms_foreign_span_reserve(int device, uint64_t bytes, ms_foreign_span** span,
                                         uint64_t* address, ms_error* error);

/* Imports and maps extents, all or none, with access for the device and its peers in use.
 * Errors: MS_INVALID_ARGUMENT if an extent is empty, is outside the span or overlaps another, or
 * its offset or size is not a multiple of the granularity; MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_foreign_span_map(ms_foreign_span* span, const ms_foreign_extent* extents,
                                     size_t count, ms_error* error);

/* Waits for work on the devices, then unmaps and releases the extents at these offsets; without
 * offsets it only waits. Ignores offsets at which nothing is mapped. After an error the call may be
 * repeated. */
MS_API ms_status ms_foreign_span_unmap(ms_foreign_span* span, const uint64_t* offsets, size_t count,
                                       ms_error* error);

/* Waits for work on the devices, then releases all extents and the addresses. Accepts NULL. */
MS_API void ms_foreign_span_free(ms_foreign_span* span);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_SHARING_H_ */
