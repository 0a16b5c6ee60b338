#include "core/transition.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>

#include "core/allocation.h"
#include "core/driver.h"
#include "core/log.h"
#include "core/options.h"
#include "core/text.h"
#include "core/transfer.h"

namespace memsaver {
namespace {

// Memory that comes back empty (a KV cache) is large and of a piece: its neighbours share this many
// times as much.
constexpr uint64_t kDiscardedShares = 4;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Gives the tags their state: `during` for the life of the object, then `after` once commit() was
// called, else what they had. Its holder holds the tags; the lock is held on construction and in
// commit().
class StateChange {
 public:
  StateChange(Hold& hold, std::vector<Tag*> tags, State during)
      : hold_(hold), tags_(std::move(tags)) {
    const bool pausing = during == State::kSaving;
    before_ = pausing ? State::kMapped : State::kPaused;
    after_ = pausing ? State::kPaused : State::kMapped;
    set(during);
  }
  ~StateChange() {
    if (committed_) return;
    hold_.lock();
    set(before_);
    hold_.unlock();
  }
  void commit() {
    set(after_);
    committed_ = true;
  }

 private:
  void set(State state) {
    for (Tag* tag : tags_) {
      tag->state = state;
      tag->accepting.store(state == State::kMapped, std::memory_order_release);
    }
  }

  Hold& hold_;
  std::vector<Tag*> tags_;
  State before_, after_;
  bool committed_ = false;
};

// The part of a transition that concerns one pool.
struct Step {
  explicit Step(Pool& pool) : pool(pool) {}

  Pool& pool;
  std::vector<Range> ranges;  // to save, or to restore
  std::vector<Range> tiles;   // to map
  bool takes_parked = false;  // the pages are those that a failed pause kept
  std::vector<CUmemAccessDesc> access;
  std::map<uint64_t, Mapping> mappings;
  // Unmapped memory and its address. While it is mapped, its place here is kept, empty.
  std::vector<std::pair<uint64_t, PhysicalMemory>> pages;
  uint64_t device_bytes = 0, copied_bytes = 0;
};

// The tags that are not yet in `wanted`.
std::vector<Tag*> changing(const Hold& hold, State wanted) {
  std::vector<Tag*> tags;
  for (Tag* tag : hold.tags()) {
    if (tag->state != wanted) tags.push_back(tag);
  }
  return tags;
}

// One row for each tag and device, in the order of the call.
std::vector<Change> report(const Hold& hold, const std::vector<Tag*>& changed,
                           const std::vector<Step>& steps) {
  std::vector<Change> rows;
  for (Tag* tag : hold.tags()) {
    const bool did = std::find(changed.begin(), changed.end(), tag) != changed.end();
    if (tag->pools.empty()) rows.push_back({tag, -1, did, 0, 0});
    for (auto& [ordinal, pool] : tag->pools) {
      Change row{tag, ordinal, did, 0, 0};
      for (const Step& step : steps) {
        if (&step.pool != &pool) continue;
        row.device_bytes = step.device_bytes;
        row.copied_bytes = step.copied_bytes;
      }
      rows.push_back(row);
    }
  }
  return rows;
}

// Gives back what destructors could not, on the devices concerned.
void collect_all_strays(const std::vector<Step>& steps) {
  std::set<Device*> devices;
  for (const Step& step : steps) devices.insert(&step.pool.heap.device());
  for (Device* device : devices) collect_strays(*device);
}

void drop_empty(Step& step) noexcept {
  for (auto at = step.mappings.begin(); at != step.mappings.end();) {
    at = at->second.bytes() == 0 ? step.mappings.erase(at) : std::next(at);
  }
  step.pages.erase(std::remove_if(step.pages.begin(), step.pages.end(),
                                  [](const auto& page) { return page.second.bytes() == 0; }),
                   step.pages.end());
}

// Unmaps everything, or nothing: true, or false with the first failure. Where pages could not be
// mapped again, they are left in `pages` and `*clean` is false. Needs no host memory: what was
// taken out of a heap must not be lost for want of it.
bool unmap_all(std::vector<Step>& steps, Error* failure, bool* clean) noexcept {
  try {
    for (Step& step : steps) {
      for (auto& [address, mapping] : step.mappings) {
        step.pages.emplace_back(address, mapping.unmap());
      }
    }
    for (Step& step : steps) step.mappings.clear();
    return true;
  } catch (Error& error) {
    *failure = std::move(error);
  } catch (...) {
    failure->status = Status::kOutOfHostMemory;
  }
  *clean = true;
  for (Step& step : steps) {
    for (auto& [address, memory] : step.pages) {
      try {
        step.mappings.at(address) = Mapping::map(address, std::move(memory), step.access);
      } catch (...) {
        *clean = false;
      }
    }
    drop_empty(step);
  }
  return false;
}

// Undoes what a resume has done to a step: new pages go back to the driver, parked ones are parked
// again. What the driver will not unmap stays mapped, and its bytes with it.
void roll_back(Step& step) noexcept {
  if (!step.takes_parked) {
    step.mappings.clear();
    return;
  }
  for (auto& [address, memory] : step.pages) {
    const auto mapping = step.mappings.find(address);
    if (memory.bytes() != 0 || mapping == step.mappings.end()) continue;
    try {
      memory = mapping->second.unmap();
    } catch (...) {
      warn_of([&] { return "pages of tag " + quoted(step.pool.tag.name) + " stay mapped"; });
    }
  }
  drop_empty(step);
}

// Maps memory behind a step's tiles, or its parked pages behind their addresses.
void map_step(Step& step) {
  const Device& device = step.pool.heap.device();
  step.access = device.access();
  for (const Range& tile : step.tiles) {
    Mapping& mapping = step.mappings[tile.address];
    mapping = Mapping::map(tile.address, PhysicalMemory::create(device, tile.bytes), step.access);
  }
  for (auto& [address, memory] : step.pages) {
    Mapping& mapping = step.mappings[address];
    mapping = Mapping::map(address, std::move(memory), step.access);
  }
}

// The error of a resume, with what the caller needs to know.
[[noreturn]] void rethrow_as_shortage(const std::vector<Tag*>& tags, const std::vector<Step>& steps,
                                      const Step& at) {
  const Device& device = at.pool.heap.device();
  uint64_t needed = 0;
  for (const Step& step : steps) {
    if (&step.pool.heap.device() == &device) needed += step.device_bytes;
  }
  std::vector<std::string> waiting;
  for (const Tag* tag : tags) waiting.push_back(tag->name);
  throw Registry::instance()
      .shortage("resuming " + format_names(waiting), device, needed)
      .with_tag(at.pool.tag.name);
}

}  // namespace

std::vector<Change> pause(const std::vector<std::string>& names, std::optional<Backup> policy,
                          const std::vector<Range>& dead, std::optional<uint64_t> seen) {
  const Clock::time_point start = Clock::now();
  check_options();
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::vector<Tag*> selected = registry.select(names);
  Hold hold(std::move(lock), std::move(selected));

  const std::vector<Tag*> tags = changing(hold, State::kPaused);
  // What was dead when the caller looked may be another tensor's by now: then everything is saved.
  const bool trust_dead = !seen || *seen == registry.changes.load();
  std::vector<Step> steps;
  for (Tag* tag : tags) {
    if (tag->open_regions > 0) {
      throw Error(Status::kInvalidState,
                  "tag " + quoted(tag->name) + " cannot be paused while a region of it is open (" +
                      std::to_string(tag->open_regions) +
                      " now, on this thread or others): new tensors would get no memory; leave the "
                      "region first")
          .with_tag(tag->name);
    }
    for (auto& [ordinal, pool] : tag->pools) {
      Step step(pool);
      if (policy.value_or(tag->policy) == Backup::kHost) {
        step.ranges = trust_dead ? subtract(pool.heap.live(), dead) : pool.heap.live();
      }
      step.device_bytes = pool.heap.resident_bytes();
      steps.push_back(std::move(step));
    }
  }
  StateChange state(hold, tags, State::kSaving);
  hold.unlock();

  if (!steps.empty()) Device::drain_active();
  collect_all_strays(steps);
  {
    Transfer transfer;
    for (Step& step : steps) {
      Pool& pool = step.pool;
      if (step.ranges.empty()) continue;
      try {
        DeviceScope scope(pool.heap.device());
        pool.backup.prepare(pool.heap.spans(), step.ranges);
      } catch (Error& error) {
        error.tag = pool.tag.name;
        throw;
      }
      step.copied_bytes = transfer.save(pool.heap.device(), pool.backup, step.ranges);
    }
    transfer.wait();
  }

  // All that needs host memory comes first: from here to the commit nothing does.
  std::vector<Change> rows = report(hold, tags, steps);
  for (Step& step : steps) {
    step.access = step.pool.heap.device().access();
    step.pages.reserve(step.pool.heap.extents().size());
  }
  Error failure(Status::kInternal, "");
  bool clean = true;

  hold.lock();
  for (Step& step : steps) step.mappings = step.pool.heap.take_all_extents();
  hold.unlock();
  const bool unmapped = unmap_all(steps, &failure, &clean);
  if (unmapped) {
    for (Step& step : steps) step.pages.clear();  // the memory goes back to the driver
  }
  hold.lock();
  for (Step& step : steps) {
    step.pool.heap.commit_extents(step.mappings);
    step.pool.parked.swap(step.pages);
    if (unmapped) step.pool.saved.swap(step.ranges);
  }
  if (unmapped || !clean) state.commit();
  if (!clean) {
    failure.message +=
        "; and pages already unmapped could not be mapped again: the tags are paused, with their "
        "pages held and their contents intact; resume them, then pause again";
  }
  if (!unmapped) throw failure;
  for (Tag* tag : tags) {
    ++tag->pauses;
    tag->last_pause_seconds = seconds_since(start);
  }
  return rows;
}

std::vector<Change> resume(const std::vector<std::string>& names) {
  const Clock::time_point start = Clock::now();
  check_options();
  const uint64_t share_bytes = option(Option::share_bytes);
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::vector<Tag*> selected = registry.select(names);
  Hold hold(std::move(lock), std::move(selected));

  const std::vector<Tag*> tags = changing(hold, State::kMapped);
  std::vector<Step> steps;
  for (Tag* tag : tags) {
    for (auto& [ordinal, pool] : tag->pools) {
      Step step(pool);
      step.takes_parked = !pool.parked.empty() || pool.heap.resident_bytes() > 0;
      if (!step.takes_parked) {
        step.tiles =
            pool.heap.plan_tiles(share_bytes * (pool.saved.empty() ? kDiscardedShares : 1));
        step.ranges = intersect(pool.saved, pool.heap.live());
      }
      step.device_bytes = total(step.tiles);
      steps.push_back(std::move(step));
    }
  }
  StateChange state(hold, tags, State::kRestoring);
  for (Step& step : steps) step.pages.swap(step.pool.parked);
  hold.unlock();

  std::vector<Change> rows;
  const Step* at = nullptr;
  try {
    collect_all_strays(steps);
    Transfer transfer;  // ends before the mappings do, so that nothing is unmapped under a copy
    for (Step& step : steps) {
      at = &step;
      map_step(step);
      step.copied_bytes = transfer.restore(step.pool.heap.device(), step.pool.backup, step.ranges);
    }
    transfer.wait();
    rows = report(hold, tags, steps);
  } catch (...) {
    for (Step& step : steps) roll_back(step);
    hold.lock();
    for (Step& step : steps) {
      step.pool.heap.commit_extents(step.mappings);
      step.pool.parked.swap(step.pages);
    }
    hold.unlock();
    try {
      throw;
    } catch (Error& error) {
      const bool no_memory =
          error.status == Status::kOutOfDeviceMemory && error.call == std::string("cuMemCreate");
      if (no_memory) rethrow_as_shortage(tags, steps, *at);
      if (at) error.tag = at->pool.tag.name;
      throw;
    }
  }

  hold.lock();
  for (Step& step : steps) {
    step.pages.clear();  // places only: the memory is mapped
    step.pool.heap.commit_extents(step.mappings);
  }
  for (Step& step : steps) step.pool.saved.clear();
  state.commit();
  for (Tag* tag : tags) {
    ++tag->resumes;
    tag->last_resume_seconds = seconds_since(start);
  }
  return rows;
}

void* backup_view(const Range& range) {
  Registry& registry = Registry::instance();
  Pool* const pool = Registry::owner(range.address);
  if (!pool) throw Error(Status::kNotOurs, "the tensor's memory is in no region of memsaver");
  Hold hold(std::unique_lock<std::mutex>(registry.mutex), {&pool->tag});
  const std::string name = quoted(pool->tag.name);
  if (pool->tag.state != State::kPaused) {
    throw Error(Status::kInvalidState, "tag " + name + " is " + name_of(pool->tag.state) +
                                           ": there is a backup to look at only while it is paused")
        .with_tag(pool->tag.name);
  }
  const std::optional<Range> block = pool->heap.block_around(range.address);
  if (!block || range.bytes > block->end() - range.address) {
    throw Error(Status::kInvalidState,
                "the tensor's memory is not inside one live allocation of tag " + name)
        .with_tag(pool->tag.name);
  }
  if (!subtract({range}, pool->saved).empty()) {
    throw Error(Status::kInvalidState,
                "not all of the range was saved when tag " + name +
                    " was paused: it had no backup, or the memory belonged to no tensor")
        .with_tag(pool->tag.name);
  }
  return pool->backup.host(range.address);
}

uint64_t trim() {
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::vector<Tag*> idle;
  for (const auto& tag : registry.tags()) {
    if (!tag->held) idle.push_back(tag.get());
  }
  Hold hold(std::move(lock), std::move(idle));
  hold.unlock();
  uint64_t released = 0;
  for (Tag* tag : hold.tags()) {
    for (auto& [ordinal, pool] : tag->pools) {
      DeviceScope scope(pool.heap.device());
      released += pool.backup.release(pool.saved);
    }
  }
  return released;
}

}  // namespace memsaver
