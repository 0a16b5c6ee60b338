// timeline: records allocations, frees, transitions and the driver's free memory.
//
// Records are kept in a ring buffer of fixed size, which is allocated when recording starts. New
// records replace the oldest, and the replaced records are counted. A record is written under the
// registry's lock when its change is committed. Writing needs no driver call, and allocates memory
// only for a tag's first baseline, which is omitted if the allocation fails. While no timeline is
// being recorded, a write costs a load and a branch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/memory/registry.h"

namespace memsaver {

// The kind of a transition.
enum class Act : int32_t { kNone = 0, kPause = 1, kResume = 2, kSwap = 3 };

enum class Outcome : int32_t { kDone = 0, kFailed = 1, kGivenUp = 2 };

struct Record {
  enum class Kind : int32_t {
    kBaseline = 0,  // the state before the first record of the tag and device
    kAllocate = 1,
    kFree = 2,   // memory was released; a free during a transition is recorded at its end
    kBegin = 3,  // a transition began
    kEnd = 4,
    kMemory = 5,  // the driver's free and total memory of a device
  };

  int64_t time_ns = 0;  // on the steady clock (CLOCK_MONOTONIC)
  Kind kind = Kind::kBaseline;
  const Tag* tag = nullptr;  // null for kMemory
  int32_t device = -1;       // -1 for a tag without memory
  State state = State::kMapped;
  // The tag's bytes on the device after the event.
  uint64_t allocated_bytes = 0, resident_bytes = 0;
  // For kBegin and kEnd:
  Act act = Act::kNone;
  uint64_t transition = 0;  // identifies the transition in all of its records
  int64_t thread = 0;       // the system's id of the thread that began the transition
  // For kEnd:
  Outcome outcome = Outcome::kDone;
  uint64_t device_bytes = 0, copied_bytes = 0;
  std::shared_ptr<const std::string> caller;  // may be null
  // For kMemory:
  uint64_t free_bytes = 0, total_bytes = 0;
};

namespace timeline {

extern std::atomic<bool> on;

inline bool recording() noexcept { return on.load(std::memory_order_relaxed); }

// --- Writing. These functions require the registry's lock, except for note_memory(). If no
// timeline is being recorded, they do nothing.

// Records a change of a pool; `kind` is kAllocate or kFree.
void write(Record::Kind kind, const Pool& pool) noexcept;
inline void note(Record::Kind kind, const Pool& pool) noexcept {
  if (recording()) write(kind, pool);
}

// The next two functions write one record for each of the tag's devices. `origin` is the call that
// began the transition.
void note_begin(const Tag& tag, Act act, uint64_t transition,
                const TransitionRecord& origin) noexcept;
void note_end(const Tag& tag, Act act, uint64_t transition, const TransitionRecord& origin,
              Outcome outcome, bool pausing) noexcept;

// Records the free memory of the devices on which tags have memory. Queries the driver without the
// registry's lock, then acquires the lock to write the record. Makes no driver call if no tag has
// memory.
void note_memory() noexcept;

// --- Reading. These functions acquire the registry's lock.

// Starts recording, with room for `capacity` records.
// Errors: kInvalidState if a recording is in progress; kInvalidArgument if `capacity` is 0 or above
// 2^24; std::bad_alloc.
void start(size_t capacity);

struct Recorded {
  std::vector<Record> records;  // baselines, then the other records in chronological order
  uint64_t dropped = 0;         // older records that were replaced
};
// Returns the records so far. Throws kInvalidState if no timeline is being recorded.
Recorded read();
// Stops recording and frees the ring buffer. Throws kInvalidState if no timeline is being recorded.
void stop();

}  // namespace timeline

}  // namespace memsaver
