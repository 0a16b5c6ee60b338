// backups: views of kept backups, and their release.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/platform/range.h"

namespace memsaver {

// Returns the host address of a range's backup, valid until the tag's next change. `writable`: the
// caller may write to the backup, and the resume restores the written bytes. Waits while another
// thread owns the tag. Throws kInvalidArgument (the range is empty); kNotOurs; kInvalidState (the
// tag is not paused, the range was not saved, or its backup is not in host memory).
void* view_backup(const Range& range, bool writable);

// Like view_backup, but for a mapped tag: returns the host address of the copy that its last pause
// saved, valid until the tag's next change or trim. `writable`: the caller may write to the copy,
// and the next pause always saves the range. Also throws kInvalidState if the copy was not
// retained, or belongs to an earlier allocation.
void* view_retained(const Range& range, bool writable);

// Releases the host memory and disk space of the named tags' backups (no names: of all tags),
// except backups of paused tags; returns the number of bytes. Skips tags that are in a transition.
// Throws kUnknownTag.
uint64_t trim_backups(const std::vector<std::string>& names);

// Returns the host memory in use for all backups, including temporary buffers.
uint64_t held_host_bytes();

}  // namespace memsaver
