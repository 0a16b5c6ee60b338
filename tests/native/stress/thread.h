// thread: a thread of the stress test, and the state that all threads share.
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

// Returns whether the tag with this index in World::tags is shareable. For each policy, one of two
// tags is shareable.
constexpr bool is_shareable(size_t tag) { return tag >= 5; }

// State shared by all threads. A block in `given` belongs to the thread that removes the block from
// `given`.
struct World {
  std::vector<std::unique_ptr<Tag>> tags;
  unsigned char lost = 0;

  std::mutex mutex;
  std::deque<Block> given;

  std::atomic<bool> stop{false};
  static constexpr size_t kMostKinds = 24;
  std::atomic<uint64_t> done[kMostKinds] = {};  // operations by kind
  // Operations that failed because of a tag's state or a lack of memory, by kind.
  std::atomic<uint64_t> refused[kMostKinds] = {};

  void fail(const std::string& what);
};

// A thread's operations, which run on the thread that calls run(). Afterwards, leave() checks and
// frees the remaining blocks, tag by tag, and close() destroys the streams.
class Thread {
 public:
  Thread(World& world, uint64_t seed) : world_(world), random_(seed) {}

  void run(uint64_t operations);
  void leave(size_t tag);  // the tag must be mapped
  void close();

  static const char* name_of(size_t kind);

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  Tag& tag_of(const Block& block) { return *world_.tags[static_cast<size_t>(block.tag)]; }
  Block* any_block();
  // Returns any block with a lock on its tag's state; null if the state does not match `paused`.
  std::pair<Block*, std::shared_lock<std::shared_mutex>> held_block(bool paused);

  // Returns whether a call succeeded; fails the test if its status is not MS_OK or in `allowed`.
  bool fine(ms_status status, const ms_error& error, const char* call,
            std::initializer_list<ms_status> allowed);

  // Operations return false if they were rejected. In memory.cpp:
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
  // In sharing.cpp:
  bool import_block();
  bool release_import();
  std::shared_lock<std::shared_mutex> hold_imported();

  void free_block(const Block& block);
  void require_contents(const Block& block, const void* at);
  void settle();                  // waits for this thread's own work
  void fill_later(Block& block);  // queues a fill; the caller sets `losses`
  // Pauses `out`, resumes `into`, or swaps both.
  bool transit(std::vector<size_t> out, std::vector<size_t> into, bool background);
  std::vector<size_t> some_tags(size_t from, size_t step);
  struct Asked;
  void choose_dead(Asked& asked);
  ms_status begin(Asked& asked);
  Block* arriving_block(const Asked& asked, size_t device);
  void run_beside(Asked& asked);
  void note(const Asked& asked);
  void check_states(const Asked& asked);

  World& world_;
  std::mt19937_64 random_;
  std::vector<Block> blocks_;
  void* streams_[kDevices] = {};
  bool working_ = false;  // whether this thread's own work is pending
  // This thread's record as an importer, and the memory that it has imported, if any.
  struct Import {
    Tag* tag = nullptr;
    ms_foreign_span* span = nullptr;
    std::vector<uint64_t> ids, offsets;
  };
  ms_importer* importer_ = nullptr;
  Import import_;

  friend struct Operations;
};

}  // namespace stress
