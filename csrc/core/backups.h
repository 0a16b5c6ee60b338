// backups: what callers do with backups that are kept: look at them, and give them back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/range.h"

namespace memsaver {

// The host address of the backup of a range, until the tag's next change. `writable`: the caller
// writes there, and what is written comes back with the resume. Waits while the tag is held. Throws
// kNotOurs; kInvalidState (the tag is not paused, the range was not saved, or not in host memory).
void* view_backup(const Range& range, bool writable);

// The same of a mapped tag: the copy that its last pause saved, until the tag's next change or
// trim. `writable`: the caller writes there, which changes nothing else. Throws kInvalidState also
// if the copy was not retained, or is of an earlier allocation.
void* view_retained(const Range& range, bool writable);

// Returns host memory and disk space of some tags (none: of all) that back no paused tag to the
// system; the bytes. Tags that are in a transition are left out. Throws kUnknownTag.
uint64_t trim_backups(const std::vector<std::string>& names);

// Host memory held for all backups, and for what they need meanwhile.
uint64_t held_host_bytes();

}  // namespace memsaver
