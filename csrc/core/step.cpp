#include "core/step.h"

#include <algorithm>
#include <set>

#include "core/driver.h"
#include "core/log.h"
#include "core/options.h"
#include "core/text.h"
#include "core/workers.h"

namespace memsaver {
namespace {

// Memory that comes back empty (a KV cache) is large and of a piece: its neighbours share this many
// times as much.
constexpr uint64_t kDiscardedShares = 6;

// `blocks` (sorted) without `holes`: block by block, not joined, as a backup wants them.
std::vector<Range> less(const std::vector<Range>& blocks, const std::vector<Range>& holes) {
  const std::vector<Range> left = subtract(blocks, holes);
  std::vector<Range> parts;
  for (const Range& block : blocks) {
    for (const Range& part : within(left, block)) parts.push_back(part);
  }
  return parts;
}

// A NaN in float64, float32, bfloat16, float16 and both common formats of 8 bits (e4m3fn, e5m2);
// -1 in integers.
constexpr unsigned char kPoison = 0xFF;

}  // namespace

std::vector<Tag*> changing(const std::vector<Tag*>& among, State wanted) {
  std::vector<Tag*> tags;
  for (Tag* tag : among) {
    if (tag->state != wanted) tags.push_back(tag);
  }
  return tags;
}

std::vector<Change> plan_rows(const std::vector<Tag*>& tags, const std::vector<Tag*>& changed) {
  std::vector<Change> rows;
  for (Tag* tag : tags) {
    const bool did = std::find(changed.begin(), changed.end(), tag) != changed.end();
    if (tag->pools.empty()) rows.push_back({tag, -1, did, 0, 0});
    for (const auto& [ordinal, pool] : tag->pools) rows.push_back({tag, ordinal, did, 0, 0});
  }
  return rows;
}

void fill_rows(std::vector<Change>& rows, const std::vector<Step>& steps) noexcept {
  for (const Step& step : steps) {
    for (Change& row : rows) {
      if (row.tag != &step.pool->tag || row.device != step.device().ordinal()) continue;
      row.device_bytes = step.device_bytes;
      row.copied_bytes = step.copied_bytes;
    }
  }
}

void tally(const std::vector<Step>& steps, bool pausing) noexcept {
  for (const Step& step : steps) {
    Pool& pool = *step.pool;
    (pausing ? pool.paused : pool.resumed).add(step.device_bytes, step.copied_bytes);
    if (!pausing) continue;
    pool.last_unchanged = step.unchanged;
    pool.unchanged.pieces += step.unchanged.pieces;
    pool.unchanged.bytes += step.unchanged.bytes;
  }
}

std::vector<Step> plan_pause(const std::vector<Tag*>& tags, std::optional<Backup> policy,
                             const std::vector<Range>& dead, bool trust_dead) {
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
      step.kind = policy.value_or(tag->policy);
      if (step.kind != Backup::kNone) {
        step.ranges = trust_dead ? less(pool.heap.live(), dead) : pool.heap.live();
      }
      step.device_bytes = pool.heap.resident_bytes();
      steps.push_back(std::move(step));
    }
  }
  return steps;
}

std::vector<Step> plan_resume(const std::vector<Tag*>& tags, uint64_t share_bytes) {
  const bool poison = flag(Option::poison);
  std::vector<Step> steps;
  for (Tag* tag : tags) {
    for (auto& [ordinal, pool] : tag->pools) {
      Step step(pool);
      // What a transition that failed twice has left: pages that are kept, or still mapped.
      std::vector<Range> there;
      for (const auto& [address, memory] : pool.parked) there.push_back({address, memory.bytes()});
      for (const auto& [address, extent] : pool.heap.extents()) {
        there.push_back({address, extent.bytes()});
      }
      const uint64_t shares = pool.saved.empty() ? kDiscardedShares : 1;
      step.tiles = pool.heap.plan_tiles(share_bytes * shares);
      if (!there.empty()) {
        step.tiles = cut(subtract(std::move(step.tiles), std::move(there)), kPieceBytes);
      }
      if (!pool.saved.empty()) step.ranges = intersect(pool.saved, pool.heap.live());
      step.device_bytes = total(step.tiles);
      step.poison = poison;
      steps.push_back(std::move(step));
    }
  }
  return steps;
}

void on_each_device(std::vector<Step>& steps,
                    const std::function<void(std::vector<Step*>&, const Step*& at)>& call) {
  std::map<Device*, std::vector<Step*>> by_device;
  for (Step& step : steps) by_device[&step.device()].push_back(&step);
  std::vector<std::pair<Device*, std::vector<Step*>>> parts(by_device.begin(), by_device.end());
  run_in_parallel(parts.size(), [&](size_t i) {
    const Step* at = nullptr;
    try {
      DeviceScope scope(*parts[i].first);
      call(parts[i].second, at);
    } catch (Error& error) {
      if (at && error.tag.empty()) error.tag = at->pool->tag.name;
      throw;
    }
  });
}

std::vector<std::string> names_of(const std::vector<Tag*>& tags) {
  std::vector<std::string> names;
  for (const Tag* tag : tags) names.push_back(tag->name);
  return names;
}

uint64_t device_bytes(const std::vector<Step>& steps) noexcept {
  uint64_t bytes = 0;
  for (const Step& step : steps) bytes += step.device_bytes;
  return bytes;
}

void collect_all_strays(const std::vector<Step>& steps) {
  std::set<Device*> devices;
  for (const Step& step : steps) devices.insert(&step.device());
  for (Device* device : devices) collect_strays(*device);
}

void prepare_stores(Hold& hold, std::vector<Step>& steps) {
  hold.lock();
  for (Step& step : steps) step.pool->retained.clear();
  hold.unlock();
  for (Step& step : steps) {
    if (step.ranges.empty()) continue;
    const BackupStore* const kept = step.pool->backup.get();
    if (kept && kept->kind() == step.kind && kept->is_sound()) continue;
    std::unique_ptr<BackupStore> store;
    try {
      store = BackupStore::make(step.kind, step.device());
    } catch (Error& error) {
      error.tag = step.pool->tag.name;
      throw;
    }
    hold.lock();  // statistics read its figures
    step.pool->backup.swap(store);
    hold.unlock();
    BackupStore::retire(std::move(store), step.device());
  }
}

void save_all(std::vector<Step>& steps, Progress& progress) {
  on_each_device(steps, [&](std::vector<Step*>& own, const Step*& at) {
    std::vector<std::pair<Step*, std::unique_ptr<Save>>> saves;
    for (Step* step : own) {
      if (step->ranges.empty()) continue;
      at = step;
      saves.emplace_back(step,
                         std::make_unique<Save>(step->device(), *step->pool->backup,
                                                step->pool->heap.spans(), step->ranges, progress));
      saves.back().second->queue(UINT64_MAX);
    }
    for (auto& [step, save] : saves) {
      at = step;
      step->copied_bytes = save->finish();
      step->unchanged = save->unchanged();
    }
  });
}

void drop_empty(Step& step) noexcept {
  for (auto at = step.mappings.begin(); at != step.mappings.end();) {
    at = at->second.bytes() == 0 ? step.mappings.erase(at) : std::next(at);
  }
  step.pages.erase(std::remove_if(step.pages.begin(), step.pages.end(),
                                  [](const Page& page) { return page.second.bytes() == 0; }),
                   step.pages.end());
}

bool unmap_all(std::vector<Step>& steps, Error* failure, bool* clean) noexcept {
  try {
    on_each_device(steps, [](std::vector<Step*>& own, const Step*& at) {
      for (Step* step : own) {
        at = step;
        for (auto& [address, mapping] : step->mappings) {
          if (mapping.bytes() == 0) continue;
          step->pages.emplace_back(address, mapping.unmap());
        }
      }
    });
    for (Step& step : steps) step.mappings.clear();
    return true;
  } catch (Error& error) {
    *failure = std::move(error);
  } catch (...) {
    // Out of host memory, which the caller's error says.
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

void map_step(Step& step, const std::function<void(const Range&)>& mapped) {
  const Device& device = step.device();
  step.access = device.access();
  for (const auto& [address, extent] : step.pool->heap.extents()) mapped({address, extent.bytes()});
  for (const Range& tile : step.tiles) {
    Mapping& mapping = step.mappings[tile.address];
    mapping = Mapping::map(tile.address, PhysicalMemory::create(device, tile.bytes), step.access);
    if (step.poison) fill_unrestored(step, tile);  // else new memory is zero
    mapped(tile);
  }
  for (auto& [address, memory] : step.pages) {
    Mapping& mapping = step.mappings[address];
    mapping = Mapping::map(address, std::move(memory), step.access);
    mapped({address, mapping.bytes()});
  }
}

void fill_unrestored(const Step& step, const Range& mapped) {
  CUstream stream = step.device().copy_stream(Device::Direction::kToDevice);
  const unsigned char value = step.poison ? kPoison : 0;
  for (const Range& gap : subtract({mapped}, within(step.ranges, mapped))) {
    CU_CHECK(cuMemsetD8Async, gap.address, value, gap.bytes, stream);
  }
}

void roll_back(Step& step) noexcept {
  for (auto& [address, memory] : step.pages) {
    const auto mapping = step.mappings.find(address);
    if (memory.bytes() != 0 || mapping == step.mappings.end()) continue;
    try {
      memory = mapping->second.unmap();
      step.mappings.erase(mapping);
    } catch (...) {
      warn_of([&] { return "pages of tag " + quoted(step.pool->tag.name) + " stay mapped"; });
    }
  }
  // What is left was made of new memory, or is a page that stays mapped.
  for (auto at = step.mappings.begin(); at != step.mappings.end();) {
    const bool was_page = std::any_of(step.pages.begin(), step.pages.end(),
                                      [&](const Page& page) { return page.first == at->first; });
    at = was_page && at->second.bytes() != 0 ? std::next(at) : step.mappings.erase(at);
  }
  drop_empty(step);
}

void release_all(std::vector<Step>& steps) noexcept {
  try {
    on_each_device(steps, [](std::vector<Step*>& own, const Step*&) {
      for (Step* step : own) step->pages.clear();
    });
  } catch (...) {
    // A device without a thread or a context of its own: the calls need neither.
  }
  for (Step& step : steps) step.pages.clear();
}

}  // namespace memsaver
