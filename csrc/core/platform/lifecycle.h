// lifecycle: fork and process exit.
//
// A child that was forked after the driver was opened shares the parent's tables but has no CUDA
// context, so the library is inert there. Every entry point that would take a lock or use the
// driver checks this first. (A child forked earlier is like any other process, as for CUDA itself.)
// The library destroys nothing at exit, because other code may still free its memory.
#pragma once

#include <atomic>

namespace memsaver {

namespace lifecycle {
extern std::atomic<bool> inert_child;
}

// Returns whether this process is a child in which the library is inert. A load.
inline bool forked() noexcept { return lifecycle::inert_child.load(std::memory_order_relaxed); }

// Throws kInvalidState in such a child.
void require_not_forked();

// Makes the library inert in children that are forked later. Called when the driver is opened.
void driver_is_open() noexcept;

}  // namespace memsaver
