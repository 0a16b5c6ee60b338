// thread: one thread of the stress, and what all of them share.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "model.h"

namespace stress {

constexpr int kDevices = 2;

// Shared by all threads. A block in `given` belongs to whoever takes it.
struct World {
  std::vector<std::unique_ptr<Tag>> tags;
  unsigned char lost = 0;

  std::mutex mutex;
  std::deque<Block> given;

  std::atomic<bool> stop{false};
  static constexpr size_t kMostKinds = 24;
  std::atomic<uint64_t> done[kMostKinds] = {};  // operations by kind
  // Of them, those that a state or a lack of memory refused.
  std::atomic<uint64_t> refused[kMostKinds] = {};

  void fail(const std::string& what);
};

// Runs its operations on the thread that calls run(). What is left in it then are blocks, which
// leave() checks and frees, tag by tag, and streams, which close() destroys.
class Thread {
 public:
  Thread(World& world, uint64_t seed) : world_(world), random_(seed) {}

  void run(uint64_t operations);
  void leave(size_t tag);  // which must be mapped
  void close();

  static const char* name_of(size_t kind);

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  Tag& tag_of(const Block& block) { return *world_.tags[static_cast<size_t>(block.tag)]; }
  Block* any_block();
  // A block whose tag is paused, or is not, and stays so under the lock; null where it is
  // otherwise.
  std::pair<Block*, std::shared_lock<std::shared_mutex>> held_block(bool paused);

  // Whether a call did what was asked; false where it was refused for a reason that is allowed.
  bool fine(ms_status status, const ms_error& error, const char* call,
            std::initializer_list<ms_status> allowed);

  // Operations: false where refused. In memory.cpp:
  bool allocate();
  bool free_one();
  bool hand_over();
  bool write();
  bool fill_on_stream();
  bool check();
  // In transitions.cpp:
  bool pause();
  bool resume();
  bool swap();
  bool in_background();
  bool everything();
  // In questions.cpp:
  bool look();
  bool watch();
  bool view_backup();
  bool fingerprint();
  bool record();
  bool housekeeping();
  bool fault();

  void free_block(const Block& block);
  void require_contents(const Block& block, const void* at);
  void settle();                  // waits for this thread's own work
  void fill_later(Block& block);  // queues a fill; `losses` is for the caller to set
  // A pause of `out`, a resume of `into`, or both in one.
  bool transit(std::vector<size_t> out, std::vector<size_t> into, bool background);
  std::vector<size_t> some_tags(size_t from, size_t step);
  struct Asked;
  void choose_dead(Asked& asked);
  ms_status begin(Asked& asked);
  void run_beside(Asked& asked);
  void note(const Asked& asked);
  void check_states(const Asked& asked);

  World& world_;
  std::mt19937_64 random_;
  std::vector<Block> blocks_;
  void* streams_[kDevices] = {};
  bool working_ = false;  // has work of its own in flight

  friend struct Operations;
};

}  // namespace stress
