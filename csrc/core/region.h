// region: which tag the calling thread's allocations belong to.
//
// Each thread has a stack of regions and disabled sections; the whole process may have a tag
// (MEMSAVER_TAG, MEMSAVER_BACKUP), which counts where a thread's stack is empty; a stream may be
// bound to a tag for threads outside any region. An open region keeps its tag from being paused.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "core/registry.h"

namespace memsaver {

// Waits for the end of a transition of the tag. Throws kInvalidArgument (empty tag) or
// kInvalidState (a paused tag, or a wait that would never end), and changes nothing. Without a
// policy an existing tag keeps its own, and a new one gets kNone.
void enter_region(const std::string& tag, std::optional<Backup> policy);
void enter_disabled();
void exit_region();  // throws kInvalidState when there is nothing to leave
size_t region_depth();

// Only allocations on these devices (bit n: device n) belong to this thread's innermost region; on
// others they belong to no tag. Throws kInvalidState outside any.
void limit_region(uint64_t devices);
bool region_covers(int device) noexcept;

// While a stream is bound, allocations for it by threads outside any region belong to the tag.
void bind_stream(void* stream, const std::string& tag, std::optional<Backup> policy);
void unbind_stream(void* stream);

namespace regions {
// Open regions and disabled sections of all threads, and one more for the process's tag or until
// the environment has been read: zero says without further looking that nobody is in a region.
extern std::atomic<int> open_anywhere;
Tag* find_current_tag() noexcept;
}  // namespace regions

// The tag of this thread's next allocation: its innermost region's; the process's, where that is
// mapped; else null. No lock, no throw, and a load where nobody is in a region: hooks ask on every
// call. An unusable environment means no process tag, and a warning once.
inline Tag* current_tag() noexcept {
  return regions::open_anywhere.load(std::memory_order_relaxed) == 0 ? nullptr
                                                                     : regions::find_current_tag();
}

// The same for an allocation on a stream: outside any region or disabled section of the thread a
// bound stream's tag comes before the process's.
Tag* current_tag(void* stream);

}  // namespace memsaver
