// importer: another process that maps memory of this process's tags.
//
// A shareable tag's memory is exportable: another process can import each of its extents through a
// file descriptor, and then shares the pages. The descriptors travel outside the core. The core
// records which process has which extents, so that a tag is not paused while one of them is
// imported. The driver itself keeps an extent allocated until its last importer has released it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/memory/registry.h"
#include "core/platform/descriptor.h"
#include "core/platform/range.h"

namespace memsaver {

// An extent of a tag that other processes can import.
struct ExportedExtent {
  Range range;
  Range span;   // the span of the heap that contains the extent
  uint64_t id;  // unique in this process; new memory at the same addresses has another id
  int device;
  Descriptor descriptor;
};

// Returns the extents under a range of a live allocation, without descriptors, in address order.
// Does not wait. Errors: kNotOurs; kSharingFailed if the tag is not mapped, the range is outside
// live allocations, or its memory is not exportable.
std::vector<ExportedExtent> exportable_extents(const Range& range);

// Marks a tag as shareable: its new memory is exportable. Memory that it already has becomes
// exportable when a resume replaces it.
void make_shareable(Tag& tag);

// One process that imports memory. Any thread, but one call at a time.
class Importer {
 public:
  static std::unique_ptr<Importer> open(int64_t pid);
  // Ends the record: the process must have released everything, or have ended.
  ~Importer();
  Importer(const Importer&) = delete;
  Importer& operator=(const Importer&) = delete;

  // Exports the extents under ranges of one tag on one device, except those that the process
  // already has, and records that it has them. Waits while a transition of the tag is in progress.
  // Exports all or none. Errors: those of exportable_extents; kInvalidArgument if there is no
  // range, or ranges of several tags or devices; kDriverFailed; kInvalidState if the wait would
  // deadlock.
  std::vector<ExportedExtent> export_extents(const std::vector<Range>& ranges);

  // Records that the process has released these extents. Ignores unknown ids.
  void released(const uint64_t* ids, size_t count) noexcept;

  int64_t pid() const { return pid_; }
  // By tag, the bytes that the process has imported. Needs the registry's lock.
  const std::map<Tag*, uint64_t>& bytes() const { return bytes_; }

 private:
  struct Piece {
    Tag* tag;
    uint64_t bytes;
  };

  explicit Importer(int64_t pid) : pid_(pid) {}
  void forget(uint64_t id) noexcept;

  const int64_t pid_;
  // Both need the registry's lock.
  std::map<uint64_t, Piece> pieces_;  // by id
  std::map<Tag*, uint64_t> bytes_;
};

// Returns whether another process has imported memory of one of the tags. Needs the lock.
bool is_imported(const std::vector<Tag*>& tags) noexcept;

// Waits until a transition of `all` can begin (Need::kTransition) and no process has imported
// memory of `out`. `lock` is the registry's lock, which is locked on return. Requests importers to
// release memory that they keep only for later imports. Errors: kTagShared after the option
// importer_seconds, with the processes and their bytes; kInvalidState like wait_for_tags.
void wait_for_importers(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& all,
                        const std::vector<Tag*>& out);

// Returns an eventfd that becomes readable when importers should release memory that no tensor
// uses: a pause waits for them, or the memory was freed. The same one at every call. Throws
// kOutOfHostMemory if there are no descriptors.
int release_requests();
// Makes the eventfd readable, if it exists. Any thread.
void request_release() noexcept;

}  // namespace memsaver
