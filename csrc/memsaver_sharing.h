/* memsaver_sharing.h: sharing the memory of tags between processes. The contract in memsaver.h
 * applies to every function.
 *
 * The exporter, which is the process that allocated the memory, calls ms_importer_export to export
 * it as file descriptors. The caller sends the descriptors (with SCM_RIGHTS) to the importer, which
 * is the process that maps the memory with ms_foreign_span_map. After the importer has unmapped the
 * memory, it sends the memory's ids back, and the exporter reports them to the library with
 * ms_importer_released.
 *
 * The library records the memory that each process has imported. A transition that would pause a
 * tag first waits, for at most the time set by option importer_seconds, until none of the tag's
 * memory is imported. After that time, the transition fails with MS_TAG_SHARED, and the error's
 * `needed_bytes` is the number of bytes still imported.
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
  uint64_t id; /* unique in the process; a resume or a swap assigns new ids to the memory it maps */
  int32_t device;
  int32_t descriptor; /* the caller closes the descriptor; -1 in results of ms_exportable */
} ms_exported;

/* The memory of one tag that one process has imported. */
typedef struct ms_import {
  const char* tag;
  int64_t pid;
  uint64_t bytes;
} ms_import;

/* Makes the memory that the tag allocates after this call exportable; without this call, no memory
 * of a tag is exportable. Memory that the tag has already allocated becomes exportable when a pause
 * and a resume replace it.
 * Errors: MS_UNKNOWN_TAG. */
MS_API ms_status ms_tag_make_shareable(const char* tag, ms_error* error);

/* Returns the extents that back a range of a live allocation, without descriptors, in address
 * order. Waits while a transition of the tag is in progress. `rows` is required.
 * Errors: MS_NOT_OURS if the range is not in memory that this library reserved; MS_SHARING_FAILED
 * if the tag is paused, the range is not in one live allocation, or its memory is not exportable;
 * MS_INVALID_STATE if the wait would deadlock. */
MS_API ms_status ms_exportable(uint64_t address, uint64_t bytes, ms_exported** rows,
                               size_t* row_count, ms_error* error);

/* The record of another process that imports memory of this process. Only one call at a time may
 * use such an object. */
typedef struct ms_importer ms_importer;

/* Opens a record for the process `pid`, which has not imported any memory yet. */
MS_API ms_status ms_importer_open(int64_t pid, ms_importer** importer, ms_error* error);

/* Exports the extents that back ranges of one tag on one device, and records that the process has
 * imported these extents. If the call fails, no extent is exported. Skips extents that the process
 * has already imported. Exports at most `most` extents; a further call exports the rest. The caller
 * closes the descriptors. Waits while a transition of the tag is in progress. `rows` is required.
 * Errors: the errors of ms_exportable; MS_INVALID_ARGUMENT if `ranges` is empty, or the ranges
 * belong to more than one tag or device. */
MS_API ms_status ms_importer_export(ms_importer* importer, const ms_range* ranges, size_t count,
                                    size_t most, ms_exported** rows, size_t* row_count,
                                    ms_error* error);

/* Records that the process has released the extents with these ids. Ignores unknown ids. */
MS_API ms_status ms_importer_released(ms_importer* importer, const uint64_t* ids, size_t count,
                                      ms_error* error);

/* Closes the record of a process that has released all imported memory or has ended. Accepts NULL.
 */
MS_API void ms_importer_close(ms_importer* importer);

/* Returns one row for each process and each tag whose memory that process has imported. */
MS_API ms_status ms_importers(ms_import** rows, size_t* row_count, ms_error* error);

/* Returns an eventfd that becomes readable when importers should release memory that they do not
 * use, because a pause is waiting for the importers or exported memory was freed. Every call
 * returns the same eventfd. The caller reads the eventfd, but must not close it.
 * Errors: MS_OUT_OF_HOST_MEMORY if no file descriptor is available. */
MS_API ms_status ms_release_requests(int* descriptor, ms_error* error);

/* --- the process that imports memory */

/* Reserved addresses for memory of another process. The reserved range mirrors a range of that
 * process (span_bytes): each extent has the same offset in both ranges. Only one call at a time may
 * use such an object. */
typedef struct ms_foreign_span ms_foreign_span;

/* An extent that another process has exported. */
typedef struct ms_foreign_extent {
  uint64_t offset, bytes; /* the extent's place in the span; offset is address - span_address */
  int32_t descriptor;     /* the caller closes the descriptor after the call */
} ms_foreign_extent;

/* Reserves `bytes` bytes of address space, rounded up to the driver's granularity, for memory of
 * `device` (-1: the calling thread's current device).
 * Errors: MS_INVALID_ARGUMENT if `bytes` is 0 or the device does not exist;
 * MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_foreign_span_reserve(int device, uint64_t bytes, ms_foreign_span** span,
                                         uint64_t* address, ms_error* error);

/* Imports and maps either all of the extents or none of them. The device and its peers that are in
 * use can access the memory.
 * Errors: MS_INVALID_ARGUMENT if an extent is empty, is outside the span or overlaps another, or
 * its offset or size is not a multiple of the granularity; MS_OUT_OF_DEVICE_MEMORY. */
MS_API ms_status ms_foreign_span_map(ms_foreign_span* span, const ms_foreign_extent* extents,
                                     size_t count, ms_error* error);

/* Waits for work on the devices, then unmaps and releases the extents at `offsets`. If `count`
 * is 0, the function only waits. Ignores offsets at which no memory is mapped. After an error,
 * the call may be repeated. */
MS_API ms_status ms_foreign_span_unmap(ms_foreign_span* span, const uint64_t* offsets, size_t count,
                                       ms_error* error);

/* Waits for work on the devices, then releases all extents and the reserved addresses. Accepts
 * NULL. */
MS_API void ms_foreign_span_free(ms_foreign_span* span);

#ifdef __cplusplus
}
#endif

#endif /* MEMSAVER_SHARING_H_ */
