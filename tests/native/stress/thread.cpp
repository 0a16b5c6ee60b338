#include "thread.h"

#include <algorithm>
#include <cstdio>
#include <shared_mutex>

#include "streams.h"

namespace stress {

struct Operations {
  struct Kind {
    const char* name;
    bool (Thread::*call)();
    uint64_t weight;
  };

  static constexpr Kind kKinds[] = {
      {"allocate", &Thread::allocate, 24},
      {"free", &Thread::free_one, 14},
      {"hand over", &Thread::hand_over, 3},
      {"write", &Thread::write, 16},
      {"fill", &Thread::fill_on_stream, 6},
      {"check", &Thread::check, 20},
      {"pause", &Thread::pause, 6},
      {"resume", &Thread::resume, 9},
      {"swap", &Thread::swap, 5},
      {"in background", &Thread::in_background, 3},
      {"everything", &Thread::everything, 1},
      {"ask", &Thread::look, 8},
      {"watch", &Thread::watch, 3},
      {"view", &Thread::view_backup, 8},
      {"fingerprint", &Thread::fingerprint, 3},
      {"record", &Thread::record, 4},
      {"housekeeping", &Thread::housekeeping, 3},
      {"fault", &Thread::fault, 1},
      {"import", &Thread::import_block, 12},
      {"release", &Thread::release_import, 6},
  };
};

static_assert(std::size(Operations::kKinds) <= World::kMostKinds);

const char* Thread::name_of(size_t kind) {
  return kind < std::size(Operations::kKinds) ? Operations::kKinds[kind].name : nullptr;
}

void World::fail(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex);
  // Immediately, because a consequence of the failure may end the process.
  if (!stop) std::fprintf(stderr, "%s\n", what.c_str());
  stop = true;
}

bool Thread::fine(ms_status status, const ms_error& error, const char* call,
                  std::initializer_list<ms_status> allowed) {
  if (status == MS_OK) return true;
  if (std::find(allowed.begin(), allowed.end(), status) == allowed.end()) {
    world_.fail(std::string(call) + ": status " + std::to_string(status) + ": " + error.message);
  }
  return false;
}

void Thread::run(uint64_t operations) {
  for (int device = 0; device < kDevices; ++device) streams_[device] = make_stream(device);
  uint64_t weights = 0;
  for (const Operations::Kind& kind : Operations::kKinds) weights += kind.weight;
  for (uint64_t i = 0; i < operations && !world_.stop; ++i) {
    uint64_t at = below(weights);
    size_t kind = 0;
    for (; at >= Operations::kKinds[kind].weight; ++kind) at -= Operations::kKinds[kind].weight;
    const auto call = Operations::kKinds[kind].call;
    const bool done = (this->*call)();
    ++(done ? world_.done : world_.refused)[kind];
  }
  settle();
  release_import();
  ms_importer_close(importer_);
}

void Thread::require_contents(const Block& block, const void* at) {
  const std::string wrong = fault_in(tag_of(block), block, at, world_.lost);
  if (!wrong.empty()) world_.fail(wrong);
}

void Thread::leave(size_t tag) {
  for (Block& block : blocks_) {
    if (static_cast<size_t>(block.tag) != tag) continue;
    require_contents(block, block.pointer);
    free_block(block);
    block.pointer = nullptr;
  }
  blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(),
                               [](const Block& block) { return !block.pointer; }),
                blocks_.end());
}

void Thread::close() {
  for (int device = 0; device < kDevices; ++device) destroy_stream(device, streams_[device]);
}

}  // namespace stress
