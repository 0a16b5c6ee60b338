// backups: provides views of kept backups, and releases backups.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/platform/range.h"

namespace memsaver {

// Returns the host address of a range's backup. The address is valid until the tag's next change.
// If `writable` is true, the caller may write to the backup, and the resume restores the written
// bytes. Waits while another thread owns the tag. Throws kInvalidArgument if the range is empty,
// kNotOurs if the range is not in memory that this library reserved, and kInvalidState if the tag
// is not paused, the range was not saved, or its backup is not in host memory.
void* view_backup(const Range& range, bool writable);

// Like view_backup(), but for a mapped tag: returns the host address of the copy that the tag's
// last pause saved. The address is valid until the tag's next change or trim. If `writable` is
// true, the caller may write to the copy, and the next pause always saves the range. Also throws
// kInvalidState if the copy was not retained or belongs to an earlier allocation.
void* view_retained(const Range& range, bool writable);

// Releases the memory and disk space of the named tags' backups, or of all tags' backups if
// `names` is empty. Backups of paused tags are not released. Returns the number of released bytes.
// Waits for allocations and frees in progress. Skips tags that are in a transition, and tags for
// which the wait would deadlock.
// Errors: kUnknownTag; kInvalidState if the thread's callback (see while_waiting) ends a wait.
uint64_t trim_backups(const std::vector<std::string>& names);

// Returns the host memory in use for all backups and their temporary buffers, in bytes.
uint64_t held_host_bytes();

}  // namespace memsaver
