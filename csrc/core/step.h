// step: what a transition does to the memory of one tag on one device, and how it is undone.
//
// The functions here need a held tag, and change no state, no heap and no backup's meaning: the
// transitions commit that. Those that destroy or move mappings expect drained devices.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/registry.h"
#include "core/status.h"
#include "core/transition.h"

namespace memsaver {

// Unmapped memory, contents and all, and the address it belongs to.
using Page = std::pair<uint64_t, PhysicalMemory>;

struct Step {
  explicit Step(Pool& pool) : pool(&pool) {}

  Device& device() const { return pool->heap.device(); }

  Pool* pool;
  Backup kind = Backup::kNone;           // of a pause: where the ranges go
  std::vector<Range> ranges;             // to save, or to restore
  std::vector<Range> tiles;              // to map with new memory
  std::vector<CUmemAccessDesc> access;   // of what is mapped
  std::map<uint64_t, Mapping> mappings;  // taken out of the heap, or made by the transition
  std::vector<Page> pages;               // while one is mapped, its place here is kept, empty
  bool poison = false;                   // of a resume: what is not restored is filled
  uint64_t device_bytes = 0, copied_bytes = 0;
  Unchanged unchanged;  // of a pause
};

// The tags of `hold` among `among` that are not yet in `wanted`.
std::vector<Tag*> changing(const std::vector<Tag*>& among, State wanted);

// One row for each tag and device, in the order of `tags`, without figures. Under the registry's
// lock.
std::vector<Change> plan_rows(const std::vector<Tag*>& tags, const std::vector<Tag*>& changed);
// Their figures.
void fill_rows(std::vector<Change>& rows, const std::vector<Step>& steps) noexcept;
// Adds them to what the pools' pauses, or resumes, have done. Under the registry's lock.
void tally(const std::vector<Step>& steps, bool pausing) noexcept;

// What the ranges of a pause are: all that lives, less `dead`. Throws kInvalidState where a region
// of a tag is open. Under the registry's lock.
std::vector<Step> plan_pause(const std::vector<Tag*>& tags, std::optional<Backup> policy,
                             const std::vector<Range>& dead, bool trust_dead);
// How a resume maps what lives, and whether it poisons (option poison). Under the registry's lock.
std::vector<Step> plan_resume(const std::vector<Tag*>& tags, uint64_t share_bytes);

// Runs call(device's steps) for every device, side by side, each on a thread of its own inside a
// DeviceScope. Errors carry the tag of the step that `at` was set to.
void on_each_device(std::vector<Step>& steps,
                    const std::function<void(std::vector<Step*>&, const Step*& at)>& call);

// For messages and profilers: the names of tags, and the device memory of steps in sum.
std::vector<std::string> names_of(const std::vector<Tag*>& tags);
uint64_t device_bytes(const std::vector<Step>& steps) noexcept;

// Gives back what destructors could not, on the devices concerned.
void collect_all_strays(const std::vector<Step>& steps);

// Ensures that each pool that saves has a sound store of its kind. Throws as BackupStore::make.
void prepare_stores(Hold& hold, std::vector<Step>& steps);

// Saves every step's ranges and returns when all has arrived; copied_bytes say how much. Throws as
// Save; then nothing is lost.
void save_all(std::vector<Step>& steps, Progress& progress);

// For the error that a caller gives to unmap_all.
constexpr const char* kNoMemory = "the process has no host memory left";

// Unmaps everything, or nothing, all devices at once: true, or false with the first failure (one
// for want of host memory leaves `*failure` as it is: there is no memory for another). Where
// pages could not be mapped again, they are left in `pages` and `*clean` is false. Needs no host
// memory once it unmaps: what was taken out of a heap must not be lost for want of it (reserve
// `pages` before).
bool unmap_all(std::vector<Step>& steps, Error* failure, bool* clean) noexcept;

// Maps memory behind a step's tiles and its pages behind their addresses, and tells of each range
// when it is there, first of those that were still mapped. Where the step poisons, fills of the
// tiles are queued: see fill_unrestored.
void map_step(Step& step, const std::function<void(const Range&)>& mapped);

// Queues fills of what in a mapped range is not to be restored: with poison where the step says so,
// else with zeros. They are on the device's stream of copies to it, which the caller waits for
// before the resume returns, and before anything is unmapped again.
void fill_unrestored(const Step& step, const Range& mapped);

// Undoes map_step: new memory goes back to the driver, pages are pages again. What the driver will
// not unmap stays mapped, and its bytes with it.
void roll_back(Step& step) noexcept;

// Gives memory back to the driver, on all devices side by side.
void release_all(std::vector<Step>& steps) noexcept;

// Takes out what owns nothing.
void drop_empty(Step& step) noexcept;

}  // namespace memsaver
