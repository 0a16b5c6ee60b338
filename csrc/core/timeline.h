// timeline: what happened to the memory of tags, while somebody records it: allocations, frees,
// transitions, and how much the driver had free.
//
// Records lie in a ring of fixed size that is made when recording starts; the oldest make place for
// new ones, and are counted. They are written under the registry's lock, where the change they tell
// of is committed, and need no driver call there, and memory only for a tag's first baseline, which
// is left out where there is none. While nobody records, writing one is a load and a branch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/registry.h"

namespace memsaver {

// What a transition is called.
enum class Act : int32_t { kNone = 0, kPause = 1, kResume = 2, kSwap = 3 };

enum class Outcome : int32_t { kDone = 0, kFailed = 1, kGivenUp = 2 };

struct Record {
  enum class Kind : int32_t {
    kBaseline = 0,  // as it was before the first record of the tag and device
    kAllocate = 1,
    kFree = 2,   // given back: of a free during a transition, at its end
    kBegin = 3,  // of a transition
    kEnd = 4,
    kMemory = 5,  // the driver's figures of a device
  };

  int64_t time_ns = 0;  // of the steady clock (CLOCK_MONOTONIC)
  Kind kind = Kind::kBaseline;
  const Tag* tag = nullptr;  // null of kMemory
  int32_t device = -1;       // -1: a tag without memory
  State state = State::kMapped;
  uint64_t allocated_bytes = 0, resident_bytes = 0;  // of the tag on the device, afterwards
  // Of kBegin and kEnd.
  Act act = Act::kNone;
  uint64_t transition = 0;  // the same of all its records, unlike every other's
  int64_t thread = 0;       // the system's number of the thread that began it
  // Of kEnd.
  Outcome outcome = Outcome::kDone;
  uint64_t device_bytes = 0, copied_bytes = 0;
  std::shared_ptr<const std::string> caller;  // may be null
  // Of kMemory.
  uint64_t free_bytes = 0, total_bytes = 0;
};

namespace timeline {

extern std::atomic<bool> on;

inline bool recording() noexcept { return on.load(std::memory_order_relaxed); }

// --- to write; under the registry's lock, but for the last. They do nothing while nobody records.

// An allocation or a free in a pool. `kind` is one of these two.
void write(Record::Kind kind, const Pool& pool) noexcept;
inline void note(Record::Kind kind, const Pool& pool) noexcept {
  if (recording()) write(kind, pool);
}

// One record for each of the tag's devices. `mark` says who began the transition.
void note_begin(const Tag& tag, Act act, uint64_t transition, const Mark& mark) noexcept;
void note_end(const Tag& tag, Act act, uint64_t transition, const Mark& mark, Outcome outcome,
              bool pausing) noexcept;

// Asks the driver, without the lock, how much is free on the devices that tags have memory of.
// Takes the lock. Makes no driver call in a process that has none of those.
void note_memory() noexcept;

// --- to read; each takes the registry's lock

// Starts to record, `capacity` records at most. Throws kInvalidState while somebody records,
// kInvalidArgument for no or more than 2^24 records, std::bad_alloc.
void start(size_t capacity);

struct Recorded {
  std::vector<Record> records;  // baselines, then the rest in the order of time
  uint64_t dropped = 0;         // older ones, that made place
};
// What is recorded so far. Throws kInvalidState while nobody records.
Recorded read();
// Ends the recording and gives up its memory. Throws likewise.
void stop();

}  // namespace timeline

}  // namespace memsaver
