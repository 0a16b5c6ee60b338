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

// As view_backup, for a mapped tag: returns the host address of the copy that its last pause saved,
// valid until the tag's next change or trim. `writable`: the caller may write there, and the next
// pause saves the range in any case. Also throws kInvalidState if the copy was not retained, or
// belongs to an earlier allocation.
void* view_retained(const Range& range, bool writable);

// Releases the host memory and disk space of the named tags' backups (no names: of all tags),
// except backups of paused tags; returns the bytes. Leaves out tags in a transition. Throws
// kUnknownTag.
uint64_t trim_backups(const std::vector<std::string>& names);

// Host memory held for all backups, and for what they need meanwhile.
uint64_t held_host_bytes();

}  // namespace memsaver
