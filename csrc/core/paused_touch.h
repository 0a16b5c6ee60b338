// paused_touch: on the simulated driver, says why the process dies that touches paused memory.
//
// There such a touch is a segmentation fault, and on a GPU an illegal access, of which the driver
// tells. So a handler of SIGSEGV writes a line with the tag and the address to stderr, and leaves
// the rest to the action that was there before: the fault happens again, and meets that one. The
// handler makes async-signal-safe calls only, and takes no lock.
#pragma once

namespace memsaver {

// From now on a touch is told of, once. Does nothing under another driver, nor in later calls. Any
// thread.
void tell_of_paused_touches() noexcept;

}  // namespace memsaver
