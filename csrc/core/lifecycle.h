// lifecycle: what the process's life asks of the library.
//
// A child that was forked after the driver was opened shares the parent's tables but no CUDA
// context: there the library is inert. Every entry that would take a lock or touch the driver asks
// first. (A child forked earlier is a process like any other, as for CUDA itself.) Nothing of the
// library is destroyed at exit: other code may still free its memory then.
#pragma once

#include <atomic>

namespace memsaver {

namespace lifecycle {
extern std::atomic<bool> inert_child;
}

// True in a child in which the library is inert. A load.
inline bool forked() noexcept { return lifecycle::inert_child.load(std::memory_order_relaxed); }

// Throws kInvalidState in such a child.
void require_not_forked();

// From now on forked children are inert. Called when the driver is opened.
void driver_is_open() noexcept;

}  // namespace memsaver
