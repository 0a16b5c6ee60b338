// registry: the tags, their memory, and the owner of each address.
//
// One lock guards the maps and the fields. No code makes driver calls, copies memory, accesses
// files or logs while it holds this lock. Slow operations run between two short sections under the
// lock, on the one thread that owns the tag's Hold. Other threads wait on `changed`
// (reservation.h), except for a free during a transition, which only marks its block. The owner of
// an address is looked up without the lock, so calls with foreign pointers cost almost nothing.
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

#include "core/backup/backup.h"
#include "core/memory/heap.h"
#include "core/platform/status.h"

namespace memsaver {

enum class State : int32_t { kMapped = 0, kSaving = 1, kPaused = 2, kRestoring = 3 };

const char* name_of(State state);

// The call that led to a tag's state, and the time of the call.
struct TransitionRecord {
  static TransitionRecord now();  // returns a record of the calling thread

  double at_seconds = 0;  // since 1970
  int64_t thread = 0;     // the system's id of the thread that began the transition
  std::shared_ptr<const std::string> caller;  // the caller's description, or null
};

struct Tag;
struct Claim;    // a thread's right to change tags; see reservation.h
struct Waiting;  // a thread that waits for tags; see reservation.h
class Importer;  // a process that maps memory of tags; see importer.h

// The number of bytes moved by a pool's pauses (or resumes): by the last one, and in total.
struct TransitionCounters {
  void add(uint64_t device_bytes, uint64_t copied_bytes) noexcept;

  uint64_t last_device_bytes = 0, last_copied_bytes = 0;
  uint64_t device_bytes = 0, copied_bytes = 0;
};

// Physical memory with its contents, and the address at which it must be mapped again.
struct UnmappedPage {
  uint64_t address;
  PhysicalMemory memory;
};

// The memory of one tag on one device. Lives as long as the process.
struct Pool {
  Pool(Tag& owner, Device& device) : tag(owner), heap(device) {}

  // Returns the device memory in use, in bytes, including retained unmapped pages.
  uint64_t resident_bytes() const noexcept;

  Tag& tag;
  Heap heap;
  // Only the owner of the tag's Hold uses the backup; the pointer changes under the registry's
  // lock.
  std::unique_ptr<BackupStore> backup;
  std::vector<Range> saved;  // the ranges of a paused heap that are in the backup, sorted
  // For a mapped heap, the sorted ranges whose last saved copy is still in the backup. A new
  // allocation is removed from these ranges; a save or a trim clears them.
  std::vector<Range> retained;
  // Retained unmapped pages: pages that a failed transition had unmapped and could not map again.
  // These pages contain the bytes that are not in `saved`. The tag is paused, and its resume maps
  // these pages.
  std::vector<UnmappedPage> unmapped_pages;
  TransitionCounters paused, resumed;
  Unchanged last_unchanged, unchanged;  // pieces that the last pause, and all pauses, did not copy
};

// The registry's lock guards all fields except the name and `accepting`. Only state_change.cpp
// writes `state` and the transition records.
struct Tag {
  explicit Tag(std::string name)
      : name(std::move(name)), last_transition(TransitionRecord::now()) {}

  const std::string name;
  Backup policy = Backup::kNone;
  State state = State::kMapped;
  TransitionRecord last_transition;        // the last successful one; initially, the tag's creation
  TransitionRecord current_transition;     // valid in kSaving and kRestoring
  Claim* hold = nullptr;                   // the claim of the thread that changes the tag's memory
  std::vector<const Claim*> reservations;  // nested reservations of one thread
  int open_regions = 0;                    // threads inside a region of the tag, and bound streams
  std::map<int, Pool> pools;               // by device ordinal; nodes never move
  uint64_t pauses = 0, resumes = 0;
  double last_pause_seconds = 0, last_resume_seconds = 0;
  double pause_seconds = 0, resume_seconds = 0;  // in total
  uint64_t failures = 0;                         // pauses, resumes and swaps that failed
  std::atomic<bool> accepting{true};  // whether the state is kMapped, for hooks, which take no lock
  std::atomic<bool> shareable{false};  // new memory is exportable; never reset
};

class Registry {
 public:
  // Returns the process's registry, which is never destroyed.
  static Registry& instance();

  std::mutex mutex;
  std::condition_variable changed;   // a Hold or a reservation of a tag ended
  Waiting* waiting = nullptr;        // the list of waiting threads; requires the lock
  std::vector<Importer*> importers;  // requires the lock

  // A counter that is incremented by every allocation, free and opened region, because each of them
  // invalidates an earlier list of torch's free blocks. Any thread.
  std::atomic<uint64_t> changes{0};

  // Unless stated otherwise, callers of the functions below must have locked `mutex`.

  Tag& tag(const std::string& name);  // Returns the tag, and creates it if it is missing.
  // Returns the tag with this name. Allocates host memory only for the error. Throws kUnknownTag;
  // the message lists the known tags.
  Tag& known(std::string_view name) const;
  // Returns the tags with these names in the same order, without duplicates, or every tag if
  // `names` is empty. Throws kUnknownTag.
  std::vector<Tag*> select(const std::vector<std::string>& names) const;
  // Returns all tags in order of creation.
  const std::vector<std::unique_ptr<Tag>>& tags() const { return tags_; }

  Pool& pool(Tag& tag, Device& device);
  // Records the owner of a span's addresses for owner(). Throws kOutOfDeviceMemory for addresses
  // beyond the table.
  void publish(const VaReservation& span, Pool& pool);
  // Reverts publish().
  void retract(const VaReservation& span) noexcept;

  // Returns the pool that reserved this address, or null. Needs no lock.
  static Pool* owner(uint64_t address) noexcept {
    const uint64_t slot = address / kSlotBytes;
    return slot < kSlots ? slots_[slot].load(std::memory_order_acquire) : nullptr;
  }

  // Returns the error for a lack of device memory, with the needed and free bytes and the memory of
  // each tag. Acquires the lock.
  Error shortage(const std::string& what, const Device& device, uint64_t needed_bytes);

 private:
  // One slot for each kSlotBytes bytes of the addresses that GPUs use. These addresses are below
  // 2^49 on every platform that CUDA supports.
  static constexpr uint64_t kSlots = (1ull << 49) / kSlotBytes;

  std::map<std::string, Tag*, std::less<>> by_name_;
  std::vector<std::unique_ptr<Tag>> tags_;
  static std::atomic<Pool*> slots_[kSlots];
};

}  // namespace memsaver
