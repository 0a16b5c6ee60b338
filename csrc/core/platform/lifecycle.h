// lifecycle: the library's behavior after fork and at process exit.
//
// A child that was forked after the driver was opened has a copy of the parent's tables but no CUDA
// context, so the library is inert in that child. Every entry point that would acquire a lock or
// use the driver calls forked() first. (A child that was forked earlier behaves like any other
// process, as it does for CUDA itself.) At process exit, the library destroys nothing, because
// other code may still free the library's memory.
#pragma once

#include <atomic>

namespace memsaver {

namespace lifecycle {
extern std::atomic<bool> inert_child;
}

// Returns whether this process is a child in which the library is inert. Costs a load.
inline bool forked() noexcept { return lifecycle::inert_child.load(std::memory_order_relaxed); }

// Throws kInvalidState in a child in which the library is inert.
void require_not_forked();

// Sets whether the library is inert in children that are forked later. The caller passes true
// before it opens the driver, and false if the driver could not be opened.
void set_driver_open(bool open) noexcept;

}  // namespace memsaver
