// The stress thread's queries, and its other operations that do not allocate or pause memory.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "sim/sim.h"
#include "thread.h"

namespace stress {
namespace {

constexpr uint64_t kPiece = 1 << 20;  // bytes per fingerprint

// Returns the address of this process's socket in $XDG_RUNTIME_DIR; an empty path if it has none.
sockaddr_un own_socket() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string folder = std::string(runtime ? runtime : "") + "/memsaver";
  const std::string own = std::to_string(getpid()) + "-";
  DIR* const files = opendir(folder.c_str());
  while (const dirent* file = files ? readdir(files) : nullptr) {
    if (std::string(file->d_name).rfind(own, 0) != 0) continue;
    const std::string path = folder + "/" + file->d_name;
    if (path.size() < sizeof(address.sun_path)) {
      std::memcpy(address.sun_path, path.c_str(), path.size());
    }
  }
  if (files) closedir(files);
  return address;
}

}  // namespace

// Requests the statistics through the socket, as another process would.
bool Thread::watch() {
  static const sockaddr_un address = own_socket();
  const int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string answer;
  if (connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      !one_in(8)) {  // otherwise it disconnects without reading
    char part[4096];
    for (ssize_t got = 0; (got = recv(client, part, sizeof(part), 0)) > 0;) {
      answer.append(part, static_cast<size_t>(got));
    }
    bool knows_all = answer.size() > 2 && answer.substr(answer.size() - 2) == "}\n";
    for (const auto& tag : world_.tags) {
      knows_all = knows_all && answer.find("{\"tag\":\"" + tag->name + "\"") != answer.npos;
    }
    if (!knows_all) world_.fail("the socket's answer is incomplete: '" + answer + "'");
  }
  ::close(client);
  return address.sun_path[0] != 0;
}

bool Thread::look() {
  ms_error error{};
  ms_usage* rows = nullptr;
  ms_range* ranges = nullptr;
  size_t count = 0;
  if (fine(ms_stats(&rows, &count, &error), error, "ms_stats", {}) && count < world_.tags.size()) {
    world_.fail("ms_stats omits tags");
  }
  ms_list_free(rows);
  uint64_t first = 0, second = 0;
  fine(ms_host_memory(&first, &second, &error), error, "ms_host_memory", {});
  fine(ms_deferred_releases(&first, &second, &second, &error), error, "ms_deferred_releases", {});
  fine(ms_device_memory(static_cast<int>(below(kDevices)), &first, &second, &error), error,
       "ms_device_memory", {});
  if (first > second) world_.fail("a device has more free than total memory");
  char value[64];
  fine(ms_option("share_bytes", value, sizeof(value), &error), error, "ms_option", {});
  ms_changes();
  const Block* const block = any_block();
  if (!block) return true;
  const Tag& tag = tag_of(*block);
  const auto address = reinterpret_cast<uint64_t>(block->pointer);
  ms_location location{};
  fine(ms_locate(static_cast<char*>(block->pointer) + block->bytes / 2, &location, &error), error,
       "ms_locate", {});
  if (location.address != address || location.device != block->device || !location.tag ||
      tag.name != location.tag) {
    world_.fail("ms_locate does not know a block of " + tag.name);
  }
  fine(ms_ranges(tag.name.c_str(), block->device, &ranges, &count, &error), error, "ms_ranges", {});
  if (!std::any_of(ranges, ranges + count,
                   [&](const ms_range& r) { return r.address == address; })) {
    world_.fail("ms_ranges does not know a block of " + tag.name);
  }
  ms_list_free(ranges);
  return true;
}

bool Thread::view_backup() {
  const auto [block, lock] = held_block(true);
  if (!block) return false;
  ms_error error{};
  void* host = nullptr;
  const bool writable = one_in(2);
  if (!fine(ms_backup_view(reinterpret_cast<uint64_t>(block->pointer), block->bytes, writable,
                           &host, &error),
            error, "ms_backup_view", {MS_INVALID_STATE})) {
    return false;
  }
  require_contents(*block, host);
  if (!writable) return true;
  block->filling = Filling::kPattern;
  block->value = random_();
  block->losses = tag_of(*block).losses;
  write_pattern(host, block->bytes, block->value);
  return true;
}

bool Thread::fingerprint() {
  const auto [block, lock] = held_block(false);
  if (!block) return false;
  const ms_range range{reinterpret_cast<uint64_t>(block->pointer), block->bytes};
  ms_error error{};
  ms_digest* digests[2] = {};
  size_t count = 0;
  bool known = true;
  for (ms_digest*& rows : digests) {
    known = known && fine(ms_fingerprint(&range, 1, &rows, &count, &error), error, "ms_fingerprint",
                          {MS_OUT_OF_HOST_MEMORY, MS_OUT_OF_DEVICE_MEMORY});
  }
  if (known && (count != (block->bytes + kPiece - 1) / kPiece ||
                std::memcmp(digests[0], digests[1], count * sizeof(ms_digest)) != 0)) {
    world_.fail("the same bytes have different fingerprints");
  }
  for (ms_digest* rows : digests) ms_list_free(rows);
  return known;
}

// The process has one timeline, which another thread may have started or stopped.
bool Thread::record() {
  ms_error error{};
  switch (below(6)) {
    case 0:
    case 1:
      return fine(ms_timeline_start(16 + below(200), &error), error, "ms_timeline_start",
                  {MS_INVALID_STATE});
    case 2:
      return fine(ms_timeline_sample(&error), error, "ms_timeline_sample", {});
    case 3:
      return fine(ms_timeline_stop(&error), error, "ms_timeline_stop", {MS_INVALID_STATE});
    default:
      break;
  }
  ms_event* rows = nullptr;
  size_t count = 0;
  uint64_t dropped = 0;
  if (!fine(ms_timeline_read(&rows, &count, &dropped, &error), error, "ms_timeline_read",
            {MS_INVALID_STATE})) {
    return false;
  }
  double last = 0;
  for (size_t i = 0; i < count; ++i) {
    const ms_event& row = rows[i];
    if (row.kind == MS_EVENT_MEMORY && row.free_bytes > row.total_bytes) {
      world_.fail("a device had more free than total memory");
    }
    if (row.kind == MS_EVENT_BASELINE) continue;
    if (row.time_seconds < last) world_.fail("a timeline goes back in time");
    last = row.time_seconds;
  }
  ms_list_free(rows);
  return true;
}

bool Thread::housekeeping() {
  static constexpr const char* kOptions[][2] = {
      {"share_bytes", "2MiB"},  {"share_bytes", "16MiB"}, {"slab_bytes", "4MiB"},
      {"slab_bytes", "64MiB"},  {"fingerprints", "off"},  {"fingerprints", "on"},
      {"margin_bytes", "4MiB"}, {"margin_bytes", "0"},    {"host_bytes", "48MiB"},
      {"host_bytes", "1GiB"},
  };
  ms_error error{};
  switch (below(4)) {
    case 0: {
      uint64_t released = 0;
      return fine(ms_trim(&released, &error), error, "ms_trim", {});
    }
    case 1:
      return fine(ms_refresh_peers(&error), error, "ms_refresh_peers", {});
    default: {
      const auto& [name, value] = kOptions[below(std::size(kOptions))];
      return fine(ms_configure(name, value, &error), error, "ms_configure", {});
    }
  }
}

// Makes one of the next calls on any thread fail because device or host memory is exhausted.
bool Thread::fault() {
  static constexpr const char* kCalls[] = {"cuMemCreate", "cuMemHostRegister", "cuMemHostAlloc"};
  constexpr int kOutOfMemory = 2;
  return sim_fail(kCalls[below(std::size(kCalls))], 1 + below(4), kOutOfMemory, 1) == 0;
}

}  // namespace stress
