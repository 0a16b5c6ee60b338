// region: the tag of the calling thread's allocations.
//
// Each thread has a stack of regions and disabled sections. The process may have a tag
// (MEMSAVER_TAG, MEMSAVER_BACKUP), which applies to threads whose stack is empty. A stream may be
// bound to a tag for threads outside any region. A tag with an open region cannot be paused.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "core/memory/registry.h"

namespace memsaver {

// Enters a region. Waits while a transition of the tag is in progress. Without a policy an existing
// tag keeps its policy, and a new tag gets kNone.
// Errors: kInvalidArgument for an empty tag; kInvalidState if the tag is paused or the wait would
// never end. Changes nothing if it fails.
void enter_region(const std::string& tag, std::optional<Backup> policy);
void enter_disabled();
void exit_region();  // throws kInvalidState if there is nothing to exit
size_t region_depth();

// Limits this thread's innermost region to these devices (bit n: device n); allocations on other
// devices belong to no tag. Throws kInvalidState outside any region.
void limit_region(uint64_t devices);
bool region_covers(int device) noexcept;

// While a stream is bound, allocations on it by threads outside any region belong to the tag.
void bind_stream(void* stream, const std::string& tag, std::optional<Backup> policy);
void unbind_stream(void* stream);

namespace regions {
// The number of open regions and disabled sections of all threads; one more if the process has a
// tag, or if the environment has not been read. If it is 0, no thread is in a region, and the
// process has no tag.
extern std::atomic<int> open_anywhere;
Tag* find_current_tag() noexcept;
}  // namespace regions

// Returns the tag of this thread's next allocation: its innermost region's tag; otherwise the
// process's tag, if it is mapped; otherwise null. Takes no lock, never throws, and costs a load if
// no thread is in a region, because hooks call it for every allocation. If the environment is
// invalid, there is no process tag, and one warning is added.
inline Tag* current_tag() noexcept {
  return regions::open_anywhere.load(std::memory_order_relaxed) == 0 ? nullptr
                                                                     : regions::find_current_tag();
}

// Like current_tag(), for an allocation on a stream: outside any region or disabled section of the
// thread, a bound stream's tag takes precedence over the process's tag.
Tag* current_tag(void* stream);

}  // namespace memsaver
