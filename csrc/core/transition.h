// transition: the only place that changes the state of a tag: mapped -> saving -> paused ->
// restoring -> mapped.
//
// Both run in three steps: plan under the registry's lock, execute without it while holding the
// tags, commit under it. Either all of the tags change, on all of their devices, or none.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/registry.h"

namespace memsaver {

// One tag on one device, as the call left it.
struct Change {
  const Tag* tag;
  int device;
  bool changed;
  uint64_t device_bytes;  // given back or taken
  uint64_t copied_bytes;
};

// Gives back the device memory of `tags` (all, when empty). Waits for the work submitted to their
// devices before. `policy` overrides the tags' own for this call; the bytes of `dead` are neither
// saved nor restored. Throws kUnknownTag; kInvalidState (an open region);
// kOutOfHostMemory; kDriverFailed. Then every tag is as it was. One exception, where the driver
// refuses even to map pages again that a failed pause had unmapped: that tag is paused with its
// pages kept, and a resume maps them.
std::vector<Change> pause(const std::vector<std::string>& tags, std::optional<Backup> policy,
                          const std::vector<Range>& dead, std::optional<uint64_t> seen);

// Maps memory behind the addresses of `tags` (all, when empty) and brings back what was saved; the
// rest reads as zero. Throws kUnknownTag, kOutOfDeviceMemory, kDriverFailed. Then every tag is
// paused as before, and holds nothing.
std::vector<Change> resume(const std::vector<std::string>& tags);

// The host address of the backup of a range, until the tag's next change. Throws kNotOurs;
// kInvalidState when the tag is not paused or not all of the range was saved.
void* backup_view(const Range& range);

// Returns the host memory that backs no paused tag; the bytes. Tags in a transition are left alone.
uint64_t trim();

}  // namespace memsaver
