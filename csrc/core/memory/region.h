// region: the tag of the calling thread's allocations.
//
// Each thread has a stack of regions and disabled sections. The process can have its own tag
// (MEMSAVER_TAG, MEMSAVER_BACKUP), which applies to threads whose stack is empty. A stream can be
// bound to a tag for threads outside any region. A tag with an open region cannot be paused.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "core/memory/registry.h"

namespace memsaver {

// Enters a region. Waits while a transition of the tag is in progress. Without `policy`, an
// existing tag keeps its policy, and the policy of a new tag is kNone.
// Errors: kInvalidArgument for an empty name; kInvalidState if the tag is paused or the wait would
// deadlock. If this function fails, nothing has changed.
void enter_region(const std::string& tag, std::optional<Backup> policy);
void enter_disabled();
void exit_region();  // throws kInvalidState if there is nothing to exit
size_t region_depth();

// Limits this thread's innermost region to the devices in the bit mask `devices`, in which bit n
// represents device n. Allocations on other devices belong to no tag. Throws kInvalidState outside
// any region.
void limit_region(uint64_t devices);
bool region_covers(int device) noexcept;

// While a stream is bound, allocations on the stream by threads outside any region belong to the
// tag.
void bind_stream(void* stream, const std::string& tag, std::optional<Backup> policy);
void unbind_stream(void* stream);

namespace regions {
// The number of open regions and disabled sections of all threads, plus one if the process has a
// tag or if the environment has not been read. If this number is 0, no thread is in a region, and
// the process has no tag.
extern std::atomic<int> open_anywhere;
Tag* find_current_tag() noexcept;
}  // namespace regions

// Returns the tag of this thread's next allocation: the tag of its innermost region, or else the
// process's tag if that tag is mapped, or else null. Hooks call this function for every allocation,
// so it acquires no lock, never throws, and costs only a load if no thread is in a region. If the
// environment is invalid, the process has no tag, and a single warning is recorded.
inline Tag* current_tag() noexcept {
  return regions::open_anywhere.load(std::memory_order_relaxed) == 0 ? nullptr
                                                                     : regions::find_current_tag();
}

// Like current_tag(), but for an allocation on a stream: if the thread is outside any region or
// disabled section, the tag to which the stream is bound, if any, takes precedence over the
// process's tag.
Tag* current_tag(void* stream);

}  // namespace memsaver
