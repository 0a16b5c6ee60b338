#include "core/memory/reservation.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>

#include "core/platform/text.h"

namespace memsaver {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLookEvery = std::chrono::milliseconds(50);

thread_local Look look;

bool is_in_transition(const Tag& tag) {
  return tag.state == State::kSaving || tag.state == State::kRestoring;
}

// The functions below require the registry's lock.

// Calls `visit(claim)` for each claim that a waiting thread waits for, until one returns true.
template <typename Visit>
bool any_in_the_way(const Waiting& waiting, Visit visit) {
  if (waiting.claim) return !waiting.claim->is_over && visit(*waiting.claim);
  const Need need = waiting.need;
  for (const Tag* tag : *waiting.tags) {
    const bool whole_hold = need == Need::kMemory || need == Need::kTransition;
    if (tag->hold && (whole_hold || is_in_transition(*tag)) && visit(*tag->hold)) return true;
    if (need != Need::kTransition && need != Need::kReservation) continue;
    for (const Claim* claim : tag->reservations) {
      if (claim->owner != waiting.thread && visit(*claim)) return true;
    }
  }
  return false;
}

bool is_free(const Waiting& waiting) {
  return !any_in_the_way(waiting, [](const Claim&) { return true; });
}

// Returns whether the wait of `waiting` depends on the thread, directly or through other threads.
bool leads_to(uint64_t thread, const Waiting& waiting, uint64_t search) {
  return any_in_the_way(waiting, [&](const Claim& claim) {
    if (claim.owner == thread) return true;
    if (claim.owner == 0) return false;  // the next owner has not taken over: it does not wait
    for (Waiting* other = Registry::instance().waiting; other; other = other->next) {
      if (other->thread != claim.owner || other->search == search) continue;
      other->search = search;
      if (leads_to(thread, *other, search)) return true;
    }
    return false;
  });
}

bool is_in_a_circle(const Waiting& waiting) {
  static uint64_t last_search = 0;
  return leads_to(waiting.thread, waiting, ++last_search);
}

// Returns the error of a wait that failed. Its message is `before`, the tags' names and `after`.
Error failed_wait(const Waiting& waiting, const std::string& before, const std::string& after) {
  std::vector<std::string> names;
  for (const Tag* tag : *waiting.tags) names.push_back(tag->name);
  return Error(Status::kInvalidState, before + format_names(names) + after)
      .with_tag(names.empty() ? "" : names.front());
}

void refuse_a_circle(const Waiting& waiting) {
  if (!is_in_a_circle(waiting)) return;
  throw failed_wait(
      waiting, "the transition of ",
      " that is in progress waits for this thread, which is itself in the middle of a transition "
      "(in a callback, a signal handler or a finalizer?), so this call would wait for ever: make "
      "the call after the callback, handler or finalizer");
}

void add(Waiting& waiting) noexcept {
  waiting.next = Registry::instance().waiting;
  Registry::instance().waiting = &waiting;
}

void remove(Waiting& waiting) noexcept {
  Waiting** at = &Registry::instance().waiting;
  while (*at != &waiting) at = &(*at)->next;
  *at = waiting.next;
}

// For a forked child, which lacks the threads that own claims or wait.
void forget_other_threads() {
  Registry& registry = Registry::instance();
  registry.waiting = nullptr;
  const auto is_gone = [](const Claim* claim) { return claim->owner != this_thread(); };
  for (const auto& tag : registry.tags()) {
    if (tag->hold && is_gone(tag->hold)) tag->hold = nullptr;
    auto& all = tag->reservations;
    all.erase(std::remove_if(all.begin(), all.end(), is_gone), all.end());
  }
}

// Calls the thread's callback, without the lock. Throws if it ends the wait.
void call_look(std::unique_lock<std::mutex>& lock, const Waiting& waiting) {
  lock.unlock();
  const Look current = look;
  look = {};  // the callback may itself wait, and set another callback
  const bool goes_on = current.look(current.data) == 0;
  look = current;
  lock.lock();
  if (!goes_on) throw failed_wait(waiting, "the wait for ", " was ended by its caller");
}

bool wait_until_free(std::unique_lock<std::mutex>& lock, Waiting& waiting,
                     const Deadline& deadline) {
  static const int prepared_for_forks = pthread_atfork(nullptr, nullptr, forget_other_threads);
  (void)prepared_for_forks;
  Registry& registry = Registry::instance();
  Clock::time_point next_look = Clock::now() + kLookEvery;
  while (!is_free(waiting)) {
    if (deadline && Clock::now() >= *deadline) return false;
    refuse_a_circle(waiting);
    add(waiting);
    if (look.look || deadline) {
      const bool before_look = deadline && (*deadline < next_look || !look.look);
      registry.changed.wait_until(lock, before_look ? *deadline : next_look);
    } else {
      registry.changed.wait(lock);
    }
    remove(waiting);
    if (!look.look || Clock::now() < next_look) continue;
    next_look = Clock::now() + kLookEvery;
    call_look(lock, waiting);
  }
  return true;
}

}  // namespace

uint64_t this_thread() noexcept {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t number = ++last;
  return number;
}

void while_waiting(const Look& wanted) noexcept { look = wanted; }

bool would_wait(const std::vector<Tag*>& tags, Need need) noexcept {
  return !is_free({this_thread(), &tags, need});
}

bool would_wait_for_ever(const std::vector<Tag*>& tags, Need need) {
  return is_in_a_circle({this_thread(), &tags, need});
}

bool wait_for_tags(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& tags, Need need,
                   const Deadline& deadline) {
  Waiting waiting{this_thread(), &tags, need};
  return wait_until_free(lock, waiting, deadline);
}

void wait_for_a_change(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& tags,
                       Clock::time_point deadline) {
  const Clock::time_point next_look = Clock::now() + kLookEvery;
  const bool looks = look.look && next_look < deadline;
  const std::cv_status woken =
      Registry::instance().changed.wait_until(lock, looks ? next_look : deadline);
  if (looks && woken == std::cv_status::timeout) {
    call_look(lock, {this_thread(), &tags, Need::kTransition});
  }
}

WaitsForTransition::WaitsForTransition(const std::vector<Tag*>& tags)
    : waiting_{this_thread(), &tags, Need::kSettled} {
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  refuse_a_circle(waiting_);
  add(waiting_);
}

WaitsForTransition::~WaitsForTransition() {
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  remove(waiting_);
}

std::unique_ptr<Reservation> Reservation::take(const std::vector<std::string>& names) {
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::unique_ptr<Reservation> made(new Reservation(registry.select(names)));
  made->claim_.is_over = true;  // until the reservation owns the tags
  try {
    wait_for_tags(lock, made->tags_, Need::kReservation);
    for (Tag* tag : made->tags_) tag->reservations.reserve(tag->reservations.size() + 1);
  } catch (...) {
    lock.unlock();  // the destructor locks it
    throw;
  }
  for (Tag* tag : made->tags_) tag->reservations.push_back(&made->claim_);
  made->claim_.owner = this_thread();
  made->claim_.is_over = false;
  lock.unlock();
  return made;
}

void Reservation::hand_over() {
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  if (claim_.is_over || claim_.owner != this_thread()) return;
  claim_.owner = 0;
  for (Tag* tag : tags_) {
    if (tag->hold && tag->hold->owner == this_thread()) tag->hold->owner = 0;
  }
}

void Reservation::take_over() {
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  for (Tag* tag : tags_) {
    if (tag->hold && tag->hold->owner == claim_.owner) tag->hold->owner = this_thread();
  }
  claim_.owner = this_thread();
}

void Reservation::release() noexcept {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (claim_.is_over) return;
  claim_.is_over = true;
  for (Tag* tag : tags_) {
    std::vector<const Claim*>& all = tag->reservations;
    all.erase(std::remove(all.begin(), all.end(), &claim_), all.end());
  }
  registry.changed.notify_all();
}

bool Reservation::wait(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(Registry::instance().mutex);
  Waiting waiting{this_thread(), &tags_, Need::kReservation, &claim_};
  return wait_until_free(lock, waiting, deadline);
}

}  // namespace memsaver
