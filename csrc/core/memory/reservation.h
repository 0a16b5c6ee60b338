// reservation: rights to change tags, the threads that own these rights, and the threads that wait
// for them.
//
// There are two kinds of rights to a tag. At most one Hold (allocation.h) at a time owns the tag's
// memory: a Hold exists while an allocation, a free or a transition that has begun needs the
// memory. At most one thread at a time may begin the tag's transitions: a Reservation spans a
// transition and its callbacks, during which other threads may still allocate memory of the tag.
//
// Each right records its owner. A thread that starts to wait can therefore determine whether the
// owners are waiting for it. If they are, the wait fails (kInvalidState), because it would
// deadlock.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/memory/registry.h"

namespace memsaver {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;

// Returns this library's id for the calling thread. The id is above 0 and, unlike the system's
// thread ids, is never reused. Any thread.
uint64_t this_thread() noexcept;

// The condition that a thread waits for tags to satisfy.
enum class Need {
  kMemory,       // to change the tags' memory: no Hold on them exists
  kTransition,   // to begin a transition: no Hold and no other thread's reservation exists
  kReservation,  // to reserve: no reservation of another thread, and no transition in progress
  kSettled,      // no transition is in progress
};

// A right to a set of tags, owned through a Hold or a Reservation. Requires the registry's lock.
struct Claim {
  uint64_t owner = 0;  // the owning thread, or 0 between hand_over() and take_over()
  bool is_over = false;
};

// A thread that waits for tags, or for the end of one claim on them.
struct Waiting {
  const uint64_t thread;
  const std::vector<Tag*>* const tags;
  const Need need;
  const Claim* const claim = nullptr;
  Waiting* next = nullptr;
  uint64_t search = 0;  // the last search for a cycle that visited this entry
};

// Waits until `tags` satisfy `need`. `lock` is the registry's lock, which is locked on return.
// Returns false if `deadline` passed first.
// Errors: kInvalidState if the wait would deadlock or if the thread's callback (see while_waiting)
// ended the wait.
bool wait_for_tags(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& tags, Need need,
                   const Deadline& deadline = std::nullopt);

// Waits until another thread changes a tag, a right or an importer, or until `deadline`. May return
// early. `lock` is the registry's lock, which is locked on return.
// Errors: kInvalidState if the thread's callback ended the wait; the message names `tags`.
void wait_for_a_change(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& tags,
                       std::chrono::steady_clock::time_point deadline);

// Returns whether wait_for_tags would have to wait. Requires the registry's lock.
bool would_wait(const std::vector<Tag*>& tags, Need need) noexcept;

// Returns whether wait_for_tags would throw because the wait would deadlock. Requires the
// registry's lock.
bool would_wait_for_ever(const std::vector<Tag*>& tags, Need need);

// While this object exists, this thread is registered as waiting, outside wait_for_tags(), for the
// end of the transition in progress on `tags`. The constructor throws kInvalidState if the wait
// would deadlock. The constructor and the destructor acquire the registry's lock.
class WaitsForTransition {
 public:
  explicit WaitsForTransition(const std::vector<Tag*>& tags);
  ~WaitsForTransition();
  WaitsForTransition(const WaitsForTransition&) = delete;
  WaitsForTransition& operator=(const WaitsForTransition&) = delete;

 private:
  Waiting waiting_;
};

// A callback for waits: while a call on this thread waits for a tag, the call runs `look(data)`
// about every 50 ms, with no lock held. If the result is not 0, the wait ends. If `look` is null,
// there is no callback.
struct Look {
  int (*look)(void*) = nullptr;
  void* data = nullptr;
};
void while_waiting(const Look& look) noexcept;

// The right to begin transitions of a set of tags. The owning thread may make further reservations
// of the same tags.
class Reservation {
 public:
  // Waits until no other thread owns a reservation or a transition of any of the tags, then
  // acquires all of the tags at once. Throws the errors of Registry::select, and kInvalidState like
  // wait_for_tags.
  static std::unique_ptr<Reservation> take(const std::vector<std::string>& names);
  ~Reservation() { release(); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Ends the calling thread's ownership of the reservation and of transitions of its tags that this
  // thread has begun. The reservation and these transitions have no owner until another thread
  // calls take_over(). Does nothing if another thread has already called take_over().
  void hand_over();
  // Makes the calling thread the owner of the reservation and of the transitions that hand_over()
  // released.
  void take_over();
  // Ends the reservation. Only the first call has an effect. Any thread.
  void release() noexcept;
  // Waits until the reservation is released. Returns false if `deadline` passes first. Any thread.
  // Throws kInvalidState like wait_for_tags.
  bool wait(const Deadline& deadline);

 private:
  explicit Reservation(std::vector<Tag*> tags) : tags_(std::move(tags)) {}

  const std::vector<Tag*> tags_;
  Claim claim_;
};

}  // namespace memsaver
