#include "core/observe/stats_server.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "core/observe/stats_json.h"
#include "core/platform/options.h"
#include "core/platform/quiet_start.h"
#include "core/platform/runtime_folder.h"

namespace memsaver {

std::atomic<bool> stats_server::settled{false};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPatience{1000};  // limit for a client that does not read
constexpr timespec kPause{0, 100'000'000};  // delay while no descriptor is available for a client
constexpr size_t kStackBytes = 512 << 10;   // the thread uses little of its stack

// One per process. A fork waits for `mutex`, so that the child knows every descriptor of the
// parent's server.
struct Server {
  std::mutex mutex;  // protects the next four fields
  // Exit and fork handlers are registered, and the library cannot be unloaded.
  bool prepared = false;
  int listener = -1;
  ino_t inode = 0;  // the inode of the listening socket
  int client = -1;  // the client that is being served
  // The process that owns the file `path`; 0 if there is no file. Each process
  // writes `path` at most once, before it sets `owner`.
  std::atomic<pid_t> owner{0};
  char path[4096] = "";
};

Server server;  // constant-initialized and trivially destroyed

// Returns whether the descriptor is still the server's socket: the program may have closed unknown
// descriptors and reused the number.
bool is_ours(const Server& of) {
  struct stat facts;
  return of.listener >= 0 && fstat(of.listener, &facts) == 0 && S_ISSOCK(facts.st_mode) &&
         facts.st_ino == of.inode;
}

// --- in a forked child

void forget_in_child() {
  if (is_ours(server)) close(server.listener);
  if (server.client >= 0) close(server.client);
  server.listener = server.client = -1;
  server.owner.store(0);
  stats_server::settled.store(false);
  server.mutex.unlock();
}

// --- at exit

void remove_file() {
  if (server.owner.load() == getpid()) unlink(server.path);
}

// --- the thread

enum class Accepted { kClient, kNobody, kNotNow, kEnd };

Accepted accept_client() {
  std::lock_guard<std::mutex> lock(server.mutex);
  if (!is_ours(server)) return Accepted::kEnd;
  server.client = accept4(server.listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (server.client >= 0) return Accepted::kClient;
  switch (errno) {
    case EAGAIN:
    case EINTR:
    case ECONNABORTED:
      return Accepted::kNobody;
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      return Accepted::kNotNow;
    default:
      return Accepted::kEnd;
  }
}

// Stops the server's thread: later clients are refused, and the socket's file is removed.
void withdraw() {
  std::lock_guard<std::mutex> lock(server.mutex);
  if (is_ours(server)) close(server.listener);
  server.listener = -1;
  remove_file();
}

void hang_up() {
  std::lock_guard<std::mutex> lock(server.mutex);
  close(server.client);
  server.client = -1;
}

bool is_same_user(int client) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  return getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

// Stops if the client has closed the connection or the time limit has passed.
void send_all(int client, const std::string& text) {
  const Clock::time_point end = Clock::now() + kPatience;
  size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t done = send(client, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (done > 0) {
      sent += static_cast<size_t>(done);
      continue;
    }
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno != EAGAIN) return;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    pollfd writable{client, POLLOUT, 0};
    if (left <= 0 || poll(&writable, 1, static_cast<int>(left)) == 0) return;
  }
}

void* serve(void* listener) noexcept {
  pthread_setname_np(pthread_self(), "memsaver-top");
  for (;;) {
    pollfd waiting{static_cast<int>(reinterpret_cast<intptr_t>(listener)), POLLIN, 0};
    const bool can_wait = poll(&waiting, 1, -1) >= 0 || errno == EINTR;
    switch (can_wait ? accept_client() : Accepted::kEnd) {
      case Accepted::kEnd:
        withdraw();
        return nullptr;
      case Accepted::kNobody:
        continue;
      case Accepted::kNotNow:
        nanosleep(&kPause, nullptr);
        continue;
      case Accepted::kClient:
        break;
    }
    try {
      if (is_same_user(server.client)) send_all(server.client, stats_json());
    } catch (...) {
      // Without memory for the answer, the client receives nothing.
    }
    hang_up();
  }
}

bool start_thread(int listener) {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  int refused;
  {
    const QuietStart quiet;
    void* const argument = reinterpret_cast<void*>(static_cast<intptr_t>(listener));
    refused = pthread_create(&thread, &attributes, serve, argument);
  }
  pthread_attr_destroy(&attributes);
  return refused == 0;
}

// --- the socket

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
  return address;
}

// Removes sockets of earlier processes with this PID, which were killed or replaced by exec.
void remove_leftovers(const RuntimeFolder& folder) {
  const std::string ours = std::to_string(getpid()) + "-";
  const std::unique_ptr<DIR, int (*)(DIR*)> files(opendir(folder.short_path(".").c_str()),
                                                  &closedir);
  if (!files) return;
  while (const dirent* file = readdir(files.get())) {
    const char* const name = file->d_name[0] == '.' ? file->d_name + 1 : file->d_name;
    if (std::strncmp(name, ours.c_str(), ours.size()) != 0) continue;
    const sockaddr_un address = address_of(folder.short_path(file->d_name));
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0) break;
    // A process in another container may have the same PID and still be running.
    const bool refused =
        connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
        errno == ECONNREFUSED;
    close(probe);
    if (refused) unlinkat(folder.descriptor(), file->d_name, 0);
  }
}

// Returns a name that no other process has used.
std::string new_name() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  char name[64];
  std::snprintf(name, sizeof(name), "%d-%llx", static_cast<int>(getpid()),
                static_cast<unsigned long long>(now.tv_sec) * 1'000'000'000ull +
                    static_cast<unsigned long long>(now.tv_nsec));
  return name;
}

// Listens on a socket that first has a hidden name, so that a socket under the final name always
// accepts connections. Returns false, with nothing left behind, if a resource is missing.
bool listen_in(const RuntimeFolder& folder) {
  const std::string name = new_name(), hidden = "." + name, path = folder.path() + "/" + name;
  if (path.size() >= sizeof(server.path)) return false;
  const sockaddr_un address = address_of(folder.short_path(hidden));
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener < 0) return false;
  const int at = folder.descriptor();
  bool done = bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  const bool is_bound = done;
  struct stat facts;
  done = done && fchmodat(at, hidden.c_str(), 0600, 0) == 0 && listen(listener, SOMAXCONN) == 0 &&
         fstat(listener, &facts) == 0 && renameat(at, hidden.c_str(), at, name.c_str()) == 0;
  if (!done) {
    if (is_bound) unlinkat(at, hidden.c_str(), 0);
    close(listener);
    return false;
  }
  server.listener = listener;
  server.inode = facts.st_ino;
  std::memcpy(server.path, path.c_str(), path.size() + 1);
  server.owner.store(getpid());
  return true;
}

// Keeps the library loaded for the thread, even after dlclose.
bool stay_loaded() {
  Dl_info own{};
  return dladdr(&server, &own) != 0 && own.dli_fname &&
         dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) != nullptr;
}

// Needs the mutex.
void start_now() {
  server.prepared =
      server.prepared || (stay_loaded() && std::atexit(remove_file) == 0 &&
                          pthread_atfork([] { server.mutex.lock(); }, [] { server.mutex.unlock(); },
                                         forget_in_child) == 0);
  if (!server.prepared) return;
  const RuntimeFolder folder;
  if (!folder.is_open()) return;
  remove_leftovers(folder);
  if (!listen_in(folder) || start_thread(server.listener)) return;
  remove_file();
  server.owner.store(0);
  close(server.listener);
  server.listener = -1;
}

}  // namespace

void stats_server::settle() noexcept {
  // If another thread owns the mutex, to start the server or to fork, does nothing; the next call
  // checks again.
  const std::unique_lock<std::mutex> lock(server.mutex, std::try_to_lock);
  if (!lock.owns_lock() || settled.load()) return;
  try {
    if (flag(Option::top)) start_now();
  } catch (...) {
    // No memory, or an invalid option, which the first allocation reports.
  }
  settled.store(true, std::memory_order_release);
}

}  // namespace memsaver
