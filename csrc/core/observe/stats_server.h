// stats_server: serves this process's statistics (stats_json.h) to other processes of the same
// user.
//
// The server consists of a socket named PID-NUMBER in the user's runtime folder (runtime_folder.h)
// and a thread that sleeps until a client connects. A client of the same user receives one
// response, then the connection is closed. The server reads no data. The thread holds none of the
// library's locks while it writes, and it disconnects a client that does not read within one
// second.
//
// Failures of the server are ignored: if the folder, a descriptor, memory or a thread is
// unavailable, or if option `top` is off, the process is not visible to `memsaver top`. A forked
// child has neither the socket nor the thread, and starts its own server for its own tags. The
// socket's file is removed at process exit. The socket file left by a process that was killed or
// called exec refuses connections. Any client, or the next process with the same PID, removes the
// file.
#pragma once

#include <atomic>

namespace memsaver {
namespace stats_server {

extern std::atomic<bool> settled;  // the server was started, or never will be
void settle() noexcept;

// Starts the server, once per process. Called with no lock held, after a tag has been created.
// Later calls cost only a load.
inline void start() noexcept {
  if (!settled.load(std::memory_order_acquire)) settle();
}

}  // namespace stats_server
}  // namespace memsaver
