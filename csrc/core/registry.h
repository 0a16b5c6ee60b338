// registry: which tags there are, which memory each has, and whose an address is.
//
// One lock guards the maps and the fields that say so. No driver call, copy, file access or log
// happens under it. Slow work is done by the one thread that owns the tag's `hold`, between two
// short sections under the lock. Other threads wait on `changed` (reservation.h), except for a free
// during a transition, which only marks its block. The owner of an address is looked up without the
// lock, so that foreign pointers cost nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/backup.h"
#include "core/heap.h"
#include "core/status.h"

namespace memsaver {

enum class State : int32_t { kMapped = 0, kSaving = 1, kPaused = 2, kRestoring = 3 };

const char* name_of(State state);

// Who brought a tag into a state, and when.
struct Mark {
  static Mark now();  // of the calling thread

  double at_seconds = 0;                      // since 1970
  int64_t thread = 0;                         // the system's number of the thread that began it
  std::shared_ptr<const std::string> caller;  // what it says of itself, or null
};

struct Tag;
struct Claim;    // a thread's right to tags; see reservation.h
struct Waiting;  // a thread that waits for tags; see reservation.h

// What the pauses, or the resumes, of a pool have done: the last one, and all. Bytes.
struct Tally {
  void add(uint64_t device_bytes, uint64_t copied_bytes) noexcept;

  uint64_t last_device_bytes = 0, last_copied_bytes = 0;
  uint64_t device_bytes = 0, copied_bytes = 0;
};

// The memory of one tag on one device. Lives as long as the process.
struct Pool {
  Pool(Tag& owner, Device& device) : tag(owner), heap(device) {}

  // Device memory held, mapped or parked, bytes.
  uint64_t resident_bytes() const noexcept;

  Tag& tag;
  Heap heap;
  // The tag's holder alone uses it; the pointer changes under the registry's lock.
  std::unique_ptr<BackupStore> backup;
  std::vector<Range> saved;  // what of a paused heap lies in the backup, sorted
  // For a mapped heap: the sorted ranges of which the backup still has the copy that the last pause
  // saved. Each new allocation is cut out; a save and a trim clear them.
  std::vector<Range> retained;
  // Pages that a transition which failed twice could not map again: unmapped, at these addresses,
  // with the contents of what is not in `saved`. The tag is paused then, and its resume maps them.
  std::vector<std::pair<uint64_t, PhysicalMemory>> parked;
  Tally paused, resumed;
  Unchanged last_unchanged, unchanged;  // of the last pause, and of all
};

// All fields under the registry's lock, but for the name and `accepting`. Only transition.cpp
// writes `state` and the marks.
struct Tag {
  explicit Tag(std::string name) : name(std::move(name)), changed(Mark::now()) {}

  const std::string name;
  Backup policy = Backup::kNone;
  State state = State::kMapped;
  Mark changed;           // the last transition that succeeded; at first, the tag's creation
  Mark changing;          // the transition in progress, in kSaving and kRestoring
  Claim* hold = nullptr;  // the claim of the thread that changes the tag's memory
  std::vector<const Claim*> reservations;  // nested reservations of one thread
  int open_regions = 0;                    // threads inside a region of it, and bound streams
  std::map<int, Pool> pools;               // by device ordinal; nodes never move
  uint64_t pauses = 0, resumes = 0;
  double last_pause_seconds = 0, last_resume_seconds = 0;
  double pause_seconds = 0, resume_seconds = 0;  // of all
  uint64_t failures = 0;                         // pauses, resumes and swaps that failed
  std::atomic<bool> accepting{true};  // the state is kMapped, for hooks that take no lock
};

class Registry {
 public:
  // The process's registry; never destroyed.
  static Registry& instance();

  std::mutex mutex;
  std::condition_variable changed;  // a hold or a reservation of a tag ended
  Waiting* waiting = nullptr;       // the threads that wait now, a list; under the lock

  // Raised by every allocation, free and opened region: who looked at torch's blocks before cannot
  // rely on what was dead then. Any thread.
  std::atomic<uint64_t> changes{0};

  // The functions below expect the caller to hold `mutex`, unless they say otherwise.

  Tag& tag(const std::string& name);  // made when missing
  // Needs host memory for the error alone. Throws kUnknownTag with the known ones.
  Tag& known(std::string_view name) const;
  // All of `names` without duplicates, in that order; every tag when empty. Throws kUnknownTag.
  std::vector<Tag*> select(const std::vector<std::string>& names) const;
  const std::vector<std::unique_ptr<Tag>>& tags() const {
    return tags_;
  }  // in the order of their making

  Pool& pool(Tag& tag, Device& device);
  // Makes owner() know a span. Throws kOutOfDeviceMemory for addresses beyond the table.
  void publish(const VaReservation& span, Pool& pool);
  // Makes owner() forget it again.
  void retract(const VaReservation& span) noexcept;

  // Without the lock: the pool that reserved this address, or null.
  static Pool* owner(uint64_t address) noexcept {
    const uint64_t slot = address / kSlotBytes;
    return slot < kSlots ? slots_[slot].load(std::memory_order_acquire) : nullptr;
  }

  // The error for device memory that is not to be had: needed and free bytes, and which tags hold
  // how much. Takes the lock itself.
  Error shortage(const std::string& what, const Device& device, uint64_t needed_bytes);

 private:
  // One slot for each kSlotBytes of the addresses that GPUs use: below 2^49 on every platform CUDA
  // runs on.
  static constexpr uint64_t kSlots = (1ull << 49) / kSlotBytes;

  std::map<std::string, Tag*, std::less<>> by_name_;
  std::vector<std::unique_ptr<Tag>> tags_;
  static std::atomic<Pool*> slots_[kSlots];
};

}  // namespace memsaver
