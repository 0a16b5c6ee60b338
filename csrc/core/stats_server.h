// stats_server: lets other processes of the same user ask for this one's figures (stats_json.h).
//
// A socket in the user's runtime folder (runtime_folder.h), named PID-NUMBER, and a thread that
// sleeps until somebody connects. Who connects and is the same user gets one answer, and the end of
// the connection; nothing is read from anybody. The thread holds no lock of ours while it writes,
// and gives a client that does not read one second.
//
// Nothing of it depends on it: where there is no folder, descriptor, memory or thread for it, or
// option `top` is off, the process cannot be watched, and that is all. A forked child has neither
// the socket nor the thread; with tags of its own it gets its own. The socket's file goes when the
// process exits; what a process leaves that was killed, or became another program, refuses
// connections, and is removed by the next process of that number and by whoever looks.
#pragma once

#include <atomic>

namespace memsaver {
namespace stats_server {

extern std::atomic<bool> settled;  // started in this process, or never to be
void settle() noexcept;

// Starts it, once in a process. Called where a tag has come to exist; under no lock. A load in all
// later calls.
inline void start() noexcept {
  if (!settled.load(std::memory_order_acquire)) settle();
}

}  // namespace stats_server
}  // namespace memsaver
