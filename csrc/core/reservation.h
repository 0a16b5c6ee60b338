// reservation: the right to change tags, the thread that owns it, and the threads that wait.
//
// A tag has two rights. Its memory belongs to one Hold (allocation.h) at a time, for as long as an
// allocation, a free or a begun transition needs it. Its transitions belong to one thread at a
// time: a Reservation spans a transition and the callbacks around it, during which other threads
// may still allocate in the tag.
//
// Each right knows the thread that owns it, so a thread that starts to wait sees whether the owners
// wait for it in turn. It is then refused (kInvalidState) instead of waiting for ever.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/registry.h"

namespace memsaver {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;

// The calling thread's number: above 0, and never another thread's, unlike the system's numbers.
uint64_t this_thread() noexcept;

// What a thread wants of tags, and so what it waits for.
enum class Need {
  kMemory,       // their memory: until no Hold has it
  kTransition,   // to begin a transition: their memory, and no other thread's reservation
  kReservation,  // to reserve: no other thread's reservation, and no transition in progress
  kSettled,      // until no transition is in progress
};

// A right to some tags: a Hold's or a Reservation's. Under the registry's lock.
struct Claim {
  uint64_t owner = 0;  // a thread, or 0 on the way from one thread to another
  bool is_over = false;
};

// A thread that waits for tags, or for the end of one claim on them.
struct Waiting {
  const uint64_t thread;
  const std::vector<Tag*>* const tags;
  const Need need;
  const Claim* const claim = nullptr;
  Waiting* next = nullptr;
  uint64_t search = 0;  // the last search for a circle that came by
};

// Waits until `tags` allow what `need` says. `lock` is the registry's; it is held on return.
// Returns false if `deadline` passed first.
// Throws kInvalidState if the wait would never end, or if the thread's look (see while_waiting)
// ended it.
bool wait_for_tags(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& tags, Need need,
                   const Deadline& deadline = std::nullopt);

// Whether that wait would be refused because it would never end. Under the registry's lock.
bool would_wait_for_ever(const std::vector<Tag*>& tags, Need need);

// Declares, for its life, that this thread waits until the transition in progress on `tags` is
// over, by means of its own. The constructor throws kInvalidState if that would never end. Takes
// the registry's lock.
class WaitsForTransition {
 public:
  explicit WaitsForTransition(const std::vector<Tag*>& tags);
  ~WaitsForTransition();
  WaitsForTransition(const WaitsForTransition&) = delete;
  WaitsForTransition& operator=(const WaitsForTransition&) = delete;

 private:
  Waiting waiting_;
};

// While a call of this thread waits for a tag, `look(data)` is called about every 50 ms, without a
// lock. A result other than 0 ends the wait. Null: nothing is called.
struct Look {
  int (*look)(void*) = nullptr;
  void* data = nullptr;
};
void while_waiting(const Look& look) noexcept;

// The right to begin transitions of some tags. The thread that owns it may take further ones, of
// the same tags too.
class Reservation {
 public:
  // Waits until no other thread has one of the tags reserved or in a transition, then takes all of
  // them at once. Throws as Registry::select, and kInvalidState as wait_for_tags.
  static std::unique_ptr<Reservation> take(const std::vector<std::string>& names);
  ~Reservation() { release(); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // The calling thread leaves it, and transitions of its tags that it has begun, to another one:
  // until that calls take_over, no thread owns them. Does nothing if that has done so already.
  void hand_over();
  // The calling thread owns it, and those transitions, from now on.
  void take_over();
  // Ends it. Calls after the first do nothing. Any thread.
  void release() noexcept;
  // Waits until it is released: false if `deadline` passed first. Any thread.
  // Throws kInvalidState as wait_for_tags.
  bool wait(const Deadline& deadline);

 private:
  explicit Reservation(std::vector<Tag*> tags) : tags_(std::move(tags)) {}

  const std::vector<Tag*> tags_;
  Claim claim_;
};

}  // namespace memsaver
