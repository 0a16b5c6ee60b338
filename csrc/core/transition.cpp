#include "core/transition.h"

#include <algorithm>
#include <chrono>

#include "core/allocation.h"
#include "core/driver.h"
#include "core/log.h"
#include "core/options.h"
#include "core/text.h"
#include "core/transfer.h"

namespace memsaver {
namespace {

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
    before_ = during == State::kSaving ? State::kMapped : State::kPaused;
    set(during);
  }
  ~StateChange() {
    if (committed_) return;
    hold_.lock();
    set(before_);
    hold_.unlock();
  }
  void commit(State after) {
    set(after);
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
  State before_;
  bool committed_ = false;
};

// The part of a transition that concerns one pool.
struct Step {
  explicit Step(Pool& pool) : pool(pool) {}

  Pool& pool;
  std::vector<Range> ranges;  // to save, or to restore
  std::vector<Range> tiles;   // to map
  bool takes_parked = false;  // the pages are those that a failed pause kept
  std::vector<Mapping> mappings;
  std::vector<std::pair<uint64_t, PhysicalMemory>> pages;  // unmapped, with their addresses
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

template <typename Action>
void for_each_device(const std::vector<Step>& steps, Action action) {
  std::vector<Device*> seen;
  for (const Step& step : steps) {
    Device* const device = &step.pool.heap.device();
    if (std::find(seen.begin(), seen.end(), device) != seen.end()) continue;
    seen.push_back(device);
    action(*device);
  }
}

// Unmaps everything, or nothing: true, or false with the first failure. Where pages could not be
// mapped again, they are left in `pages` and `*clean` is false.
bool unmap_all(std::vector<Step>& steps, Error* failure, bool* clean) {
  for (Step& step : steps) step.pages.reserve(step.mappings.size());
  try {
    for (Step& step : steps) {
      for (; !step.mappings.empty(); step.mappings.pop_back()) {
        const uint64_t address = step.mappings.back().address();
        step.pages.emplace_back(address, step.mappings.back().unmap());
      }
    }
    return true;
  } catch (const Error& error) {
    *failure = error;
  }
  *clean = true;
  for (Step& step : steps) {
    try {
      const std::vector<CUmemAccessDesc> access = step.pool.heap.device().access();
      for (; !step.pages.empty(); step.pages.pop_back()) {
        auto& [address, memory] = step.pages.back();
        step.mappings.push_back(Mapping::map(address, std::move(memory), access));
      }
    } catch (const Error& error) {
      warn("pages of tag " + quoted(step.pool.tag.name) +
           " could not be mapped again: " + error.message);
      *clean = false;
    }
  }
  return false;
}

// Undoes what a resume has done to a step: new pages go back to the driver, parked ones are parked
// again. What the driver will not unmap stays mapped, and its bytes with it.
void roll_back(Step& step) {
  if (!step.takes_parked) {
    step.mappings.clear();
    return;
  }
  std::vector<Mapping> kept;
  for (Mapping& mapping : step.mappings) {
    try {
      const uint64_t address = mapping.address();
      step.pool.parked.emplace_back(address, mapping.unmap());
    } catch (const Error& error) {
      warn("pages of tag " + quoted(step.pool.tag.name) + " stay mapped: " + error.message);
      kept.push_back(std::move(mapping));
    }
  }
  step.mappings = std::move(kept);
}

uint64_t total(const std::vector<Range>& ranges) {
  uint64_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

// Maps memory behind a step's tiles, or its parked pages behind their addresses.
void map_step(Step& step) {
  Pool& pool = step.pool;
  const Device& device = pool.heap.device();
  const std::vector<CUmemAccessDesc> access = device.access();
  step.mappings.reserve(step.tiles.size() + pool.parked.size());
  for (const Range& tile : step.tiles) {
    step.mappings.push_back(
        Mapping::map(tile.address, PhysicalMemory::create(device, tile.bytes), access));
  }
  for (; step.takes_parked && !pool.parked.empty(); pool.parked.pop_back()) {
    auto& [address, memory] = pool.parked.back();
    step.mappings.push_back(Mapping::map(address, std::move(memory), access));
  }
}

}  // namespace

std::vector<Change> pause(const std::vector<std::string>& names, std::optional<Backup> policy,
                          const std::vector<Range>& dead) {
  const Clock::time_point start = Clock::now();
  check_options();
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::vector<Tag*> selected = registry.select(names);
  Hold hold(std::move(lock), std::move(selected));

  const std::vector<Tag*> tags = changing(hold, State::kPaused);
  std::vector<Step> steps;
  for (Tag* tag : tags) {
    if (tag->open_regions > 0) {
      throw Error(Status::kInvalidState,
                  "tag " + quoted(tag->name) +
                      " cannot be paused inside its own region, where new tensors would get "
                      "no memory: " +
                      std::to_string(tag->open_regions) +
                      " region(s) of it are open; leave them first")
          .with_tag(tag->name);
    }
    for (auto& [ordinal, pool] : tag->pools) {
      Step step(pool);
      if (policy.value_or(tag->policy) == Backup::kHost)
        step.ranges = subtract(pool.heap.live(), dead);
      step.device_bytes = pool.heap.resident_bytes();
      steps.push_back(std::move(step));
    }
  }
  StateChange state(hold, tags, State::kSaving);
  hold.unlock();

  for_each_device(steps, [](Device& device) {
    device.drain();
    collect_strays(device);
  });
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

  hold.lock();
  for (Step& step : steps) step.mappings = step.pool.heap.take_all_extents();
  hold.unlock();
  Error failure(Status::kInternal, "");
  bool clean = true;
  const bool unmapped = unmap_all(steps, &failure, &clean);
  if (unmapped) {
    for (Step& step : steps) step.pages.clear();  // the memory goes back to the driver
  }

  hold.lock();
  for (Step& step : steps) {
    step.pool.heap.commit_extents(std::move(step.mappings));
    step.pool.parked = std::move(step.pages);
    if (unmapped) step.pool.saved = std::move(step.ranges);
  }
  if (!clean) {
    state.commit(State::kPaused);
    failure.message +=
        "; and pages already unmapped could not be mapped again: the tags are paused, with their "
        "pages "
        "held and their contents intact; resume them, then pause again";
  }
  if (!unmapped) throw failure;
  state.commit(State::kPaused);
  for (Tag* tag : tags) {
    ++tag->pauses;
    tag->last_pause_seconds = seconds_since(start);
  }
  return report(hold, tags, steps);
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
        step.tiles = pool.heap.plan_tiles(share_bytes);
        step.ranges = pool.saved;
      }
      step.device_bytes = total(step.tiles);
      steps.push_back(std::move(step));
    }
  }
  StateChange state(hold, tags, State::kRestoring);
  hold.unlock();

  for_each_device(steps, [](Device& device) { collect_strays(device); });
  const Step* at = nullptr;
  try {
    Transfer transfer;  // ends before the mappings do, so that nothing is unmapped under a copy
    for (Step& step : steps) {
      at = &step;
      map_step(step);
      step.copied_bytes = transfer.restore(step.pool.heap.device(), step.pool.backup, step.ranges);
    }
    transfer.wait();
  } catch (Error& error) {
    for (Step& step : steps) roll_back(step);
    hold.lock();
    for (Step& step : steps) step.pool.heap.commit_extents(std::move(step.mappings));
    hold.unlock();
    if (error.status == Status::kOutOfDeviceMemory && error.call == std::string("cuMemCreate")) {
      const Device& device = at->pool.heap.device();
      uint64_t needed = 0;
      for (const Step& step : steps) {
        if (&step.pool.heap.device() == &device) needed += step.device_bytes;
      }
      std::vector<std::string> waiting;
      for (const Tag* tag : tags) waiting.push_back(tag->name);
      throw registry.shortage("resuming " + format_names(waiting), device, needed)
          .with_tag(at->pool.tag.name);
    }
    if (at) error.tag = at->pool.tag.name;
    throw;
  }

  hold.lock();
  for (Step& step : steps) {
    step.pool.heap.commit_extents(std::move(step.mappings));
    step.pool.saved.clear();
  }
  state.commit(State::kMapped);
  for (Tag* tag : tags) {
    ++tag->resumes;
    tag->last_resume_seconds = seconds_since(start);
  }
  return report(hold, tags, steps);
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
    if (tag->state == State::kMapped && !tag->held) idle.push_back(tag.get());
  }
  Hold hold(std::move(lock), std::move(idle));
  hold.unlock();
  uint64_t released = 0;
  for (Tag* tag : hold.tags()) {
    for (auto& [ordinal, pool] : tag->pools) {
      DeviceScope scope(pool.heap.device());
      released += pool.backup.release();
    }
  }
  return released;
}

}  // namespace memsaver
