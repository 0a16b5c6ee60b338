// exports: exports the memory of tags to other processes.
//
// A shareable tag's memory is exportable: another process can import each of its extents through a
// file descriptor, and then shares the pages. Code outside the core sends the descriptors.
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory/importer.h"
#include "core/memory/registry.h"
#include "core/platform/descriptor.h"
#include "core/platform/range.h"

namespace memsaver {

// An extent of a tag that other processes can import.
struct ExportedExtent {
  Range range;
  Range span;  // the span of the heap that contains the extent
  // Unique in this process. A resume or a swap assigns a new id to all memory that it maps.
  uint64_t id;
  int device;
  Descriptor descriptor;
};

// Marks a tag as shareable, so that memory that the tag allocates later is exportable. Memory that
// the tag already has becomes exportable when a resume replaces it.
void make_shareable(Tag& tag) noexcept;

// Returns the extents that back a range of a live allocation, without descriptors, in address
// order. Waits while a transition of the tag is in progress. Errors: kNotOurs if the range is not
// in memory that this library reserved; kSharingFailed if the tag is paused, the range is outside
// live allocations, or its memory is not exportable; kInvalidState if the wait would deadlock.
std::vector<ExportedExtent> exportable_extents(const Range& range);

// Exports the extents that back ranges of one tag on one device, but at most `most` extents. Skips
// extents that the process of `to` has already imported. Records that the process has imported the
// exported extents. Waits while a transition of the tag is in progress. If this function fails, no
// extent is exported. Errors: the errors of exportable_extents(); kInvalidArgument if `ranges` is
// empty, or the ranges belong to more than one tag or device; kDriverFailed if a driver call
// fails; kInvalidState if the wait would deadlock.
std::vector<ExportedExtent> export_extents(Importer& to, const std::vector<Range>& ranges,
                                           size_t most);

}  // namespace memsaver
