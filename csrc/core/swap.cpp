#include "core/swap.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "core/driver.h"
#include "core/handover.h"
#include "core/options.h"
#include "core/profile.h"
#include "core/staging.h"
#include "core/step.h"
#include "core/text.h"
#include "core/workers.h"

namespace memsaver {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kNotUndone =
    "; and this could not be undone: the tags that were to go out are paused, with all their bytes "
    "in their backups or in pages that are kept; resume them";

constexpr const char* kInTurn = "; pausing the one and then resuming the other takes less";

// How far ahead of the page that is handed over copies are queued: two pages of share_bytes.
constexpr size_t kAhead = 2;

// What happens on one device.
struct Side {
  std::vector<Step*> out, into;
  Handover plan;
  std::map<Step*, std::unique_ptr<Save>> saves;  // kept until nothing can fail any more
  std::vector<std::vector<Range>> saved;         // for each hand: what is saved of its page
  std::map<Step*, std::vector<Range>> handed;    // room for all of that, in undoing
  std::unique_ptr<StagingBuffer> reserve;        // through which staged bytes come back

  void prepare_undo();
  void make_reserve();
};

void Side::prepare_undo() {
  saved.clear();
  handed.clear();
  for (Step* step : out) handed[step];
  std::map<Step*, size_t> count;
  for (const Hand& hand : plan.hands) {
    saved.push_back(within(hand.from->ranges, {hand.page, hand.bytes}));
    count[hand.from] += saved.back().size();
  }
  for (auto& [step, ranges] : handed) ranges.reserve(count[step]);
}

// Inside a DeviceScope. Throws kOutOfHostMemory, kDriverFailed.
void Side::make_reserve() {
  uint64_t bytes = 0;
  for (Step* step : out) {
    if (step->ranges.empty() || step->pool->backup->is_direct()) continue;
    const bool gives = std::any_of(plan.hands.begin(), plan.hands.end(),
                                   [&](const Hand& hand) { return hand.from == step; });
    if (gives) bytes = std::max(bytes, staged_bytes(step->ranges));
  }
  if (bytes == 0) return;
  reserve = std::make_unique<StagingBuffer>(out.front()->device(),
                                            HostClaim::take(bytes, "a staging buffer"));
}

class Swap : public Transition {
 public:
  Swap(std::unique_ptr<Hold> hold, std::vector<Tag*> going, std::vector<Tag*> coming,
       std::vector<Change> rows, std::vector<Step> out, std::vector<Step> into)
      : Transition(std::move(hold), std::move(rows), Act::kSwap),
        going_(*hold_, std::move(going), State::kSaving, label_),
        coming_(*hold_, std::move(coming), State::kRestoring, label_),
        out_(std::move(out)),
        into_(std::move(into)) {}

 private:
  std::vector<Change> execute() override;
  uint64_t moved_bytes() const noexcept override { return device_bytes(out_); }
  void end(Outcome outcome) noexcept override {
    going_.end(outcome);
    coming_.end(outcome);
  }
  void exchange_all(bool beyond);
  void exchange(bool beyond);
  void exchange_on(Side& side, const Step*& at);
  void fill(const Hand& hand, Restore* restore);
  void on_each_side(const std::function<void(Side&, const Step*& at)>& call);
  bool undo(bool whole) noexcept;  // whether the tags are as before
  static bool take_back(Device& device, Side& side) noexcept;
  static void keep_paused(const Device& device, Side& side) noexcept;
  static void end_saves(const Device& device, Side& side) noexcept;

  const Clock::time_point start_ = Clock::now();
  StateChange going_, coming_;
  std::vector<Step> out_, into_;
  std::map<Device*, Side> sides_;
  const Device* short_of_ = nullptr;  // the device that gave the most of too little
  uint64_t missing_bytes_ = 0;
};

void Swap::on_each_side(const std::function<void(Side&, const Step*& at)>& call) {
  std::vector<std::pair<Device* const, Side>*> sides;
  for (auto& side : sides_) sides.push_back(&side);
  run_in_parallel(sides.size(), [&](size_t i) {
    const Step* at = nullptr;
    try {
      DeviceScope scope(*sides[i]->first);
      call(sides[i]->second, at);
    } catch (Error& error) {
      if (at && error.tag.empty()) error.tag = at->pool->tag.name;
      throw;
    }
  });
}

// What lies in a page that came over: zeros (or poison), and what is to be restored.
void Swap::fill(const Hand& hand, Restore* restore) {
  const Range tile{hand.at, hand.bytes};
  fill_unrestored(*hand.to, tile);
  if (restore) restore->queue(tile);
}

void Swap::exchange_on(Side& side, const Step*& at) {
  if (!side.out.empty()) at = side.out.front();
  side.make_reserve();
  std::map<Step*, std::unique_ptr<Restore>> restores;
  const auto restore_of = [&](Step* step) {
    const auto found = restores.find(step);
    return found == restores.end() ? nullptr : found->second.get();
  };
  for (Step* step : side.into) {
    if (step->ranges.empty()) continue;
    restores[step] =
        std::make_unique<Restore>(step->device(), *step->pool->backup, step->pool->saved,
                                  step->ranges, progress_, side.reserve.get());
  }
  // New memory first: here it can be refused, and nothing has happened.
  for (Step* step : side.into) {
    at = step;
    step->tiles.clear();
    for (const auto& [to, tile] : side.plan.missing) {
      if (to == step) step->tiles.push_back(tile);
    }
    const auto mapped = [&](const Range& range) {
      if (Restore* restore = restore_of(step)) restore->queue(range);
    };
    map_step(*step, mapped);
  }
  for (Step* step : side.out) {
    if (step->ranges.empty()) continue;
    at = step;
    side.saves.emplace(
        step, std::make_unique<Save>(step->device(), *step->pool->backup, step->pool->heap.spans(),
                                     step->ranges, progress_, side.reserve.get()));
  }
  // Pages of tags that are saved change hands one by one, as their bytes arrive; what is discarded
  // is not overwritten before everything is mapped.
  std::vector<const Hand*> discarded;
  for (size_t i = 0; i < side.plan.hands.size(); ++i) {
    Hand& hand = side.plan.hands[i];
    const auto save = side.saves.find(hand.from);
    if (save != side.saves.end()) {
      at = hand.from;
      for (size_t next = i; next <= i + kAhead && next < side.plan.hands.size(); ++next) {
        const Hand& ahead = side.plan.hands[next];
        if (ahead.from == hand.from) save->second->queue(ahead.page + ahead.bytes);
      }
      save->second->wait(hand.page + hand.bytes);
    }
    at = hand.to;
    const auto source = hand.from->mappings.find(hand.page);
    Mapping& target = hand.to->mappings[hand.at];
    hand.memory = source->second.unmap();
    hand.left = true;  // its place there is kept, empty: taking it back needs no memory
    target = Mapping::map(hand.at, std::move(hand.memory), hand.to->access);
    if (save != side.saves.end()) {
      fill(hand, restore_of(hand.to));
    } else {
      discarded.push_back(&hand);
    }
  }
  for (auto& [step, save] : side.saves) {
    at = step;
    step->copied_bytes = save->finish();
    step->unchanged = save->unchanged();
  }
  for (const Hand* hand : discarded) {
    at = hand->to;
    fill(*hand, restore_of(hand->to));
  }
  for (auto& [step, restore] : restores) {
    at = step;
    step->copied_bytes = restore->finish();
  }
  if (!side.into.empty()) {
    Device& device = side.into.front()->device();
    CU_CHECK(cuStreamSynchronize, device.copy_stream(Device::Direction::kToDevice));
  }
}

void Swap::exchange(bool beyond) {
  for (Step& step : out_) sides_[&step.device()].out.push_back(&step);
  for (Step& step : into_) sides_[&step.device()].into.push_back(&step);
  missing_bytes_ = 0;
  for (auto& [device, side] : sides_) {
    side.plan = plan_handover(side.out, side.into, beyond);
    side.prepare_undo();
    uint64_t missing = 0;
    for (const auto& [step, tile] : side.plan.missing) missing += tile.bytes;
    if (missing > missing_bytes_) {
      missing_bytes_ = missing;
      short_of_ = device;
    }
  }
  on_each_side([this](Side& side, const Step*& at) {
    try {
      exchange_on(side, at);
    } catch (...) {  // here there is a context to wait in
      for (auto& [step, save] : side.saves) save->stop();
      for (Step* step : side.into) settle(step->device(), Device::Direction::kToDevice);
      throw;
    }
  });
}

// A context for copies and waits, or null where there is none to be had.
std::unique_ptr<DeviceScope> try_scope(const Device& device) noexcept try {
  return std::make_unique<DeviceScope>(device);
} catch (...) {
  return nullptr;
}

// Gives the pages back to whom they came from, contents and all. False where that failed. Only
// what left needs the driver, and only the contents a context.
bool Swap::take_back(Device& device, Side& side) noexcept try {
  bool whole = true;
  const bool any_left = std::any_of(side.plan.hands.begin(), side.plan.hands.end(),
                                    [](const Hand& hand) { return hand.left; });
  const std::unique_ptr<DeviceScope> scope = any_left ? try_scope(device) : nullptr;
  std::map<Step*, std::vector<Range>> handed;
  for (Hand& hand : side.plan.hands) {
    const auto mapping = hand.to->mappings.find(hand.at);
    const bool moved = mapping != hand.to->mappings.end() && mapping->second.bytes() != 0;
    if (moved) {
      try {
        hand.memory = mapping->second.unmap();
      } catch (...) {
        whole = false;
        continue;
      }
    }
    if (mapping != hand.to->mappings.end()) hand.to->mappings.erase(mapping);
    if (hand.memory.bytes() == 0) continue;  // it never left
    handed[hand.from].push_back({hand.page, hand.bytes});
    try {
      hand.from->mappings[hand.page] =
          Mapping::map(hand.page, std::move(hand.memory), hand.from->access);
    } catch (...) {
      whole = false;
    }
  }
  for (auto& [step, pages] : handed) {
    const auto save = side.saves.find(step);
    if (!whole || save == side.saves.end()) continue;
    Progress unseen;
    const std::vector<Range> ranges = intersect(step->ranges, pages);
    Restore restore(step->device(), *step->pool->backup, ranges, ranges, unseen,
                    side.reserve.get());
    for (const Range& page : pages) restore.queue(page);
    restore.finish();
  }
  return whole;
} catch (...) {
  return false;
}

// Makes of tags that could not be made whole again paused ones that have lost nothing: what was
// handed over lies in the backup, the rest in pages that are kept. Needs no host memory: the want
// of it may be why.
void Swap::keep_paused(const Device& device, Side& side) noexcept try {
  const std::unique_ptr<DeviceScope> scope = try_scope(device);
  for (Step* step : side.out) {
    std::vector<Range>& handed = side.handed.at(step);
    for (size_t i = 0; i < side.plan.hands.size(); ++i) {
      const Hand& hand = side.plan.hands[i];
      if (hand.from != step || !hand.left) continue;
      handed.insert(handed.end(), side.saved[i].begin(), side.saved[i].end());
    }
    step->ranges.swap(handed);
    const auto save = side.saves.find(step);
    if (save != side.saves.end()) save->second->keep();
    for (const Hand& hand : side.plan.hands) {
      if (hand.from == step && hand.left) step->mappings.erase(hand.page);
    }
    for (auto at = step->mappings.begin(); at != step->mappings.end();) {
      try {
        step->pages.emplace_back(at->first, PhysicalMemory());
        if (at->second.bytes() > 0) step->pages.back().second = at->second.unmap();
        at = step->mappings.erase(at);
      } catch (...) {
        ++at;  // it stays mapped, and counted
      }
    }
    drop_empty(*step);
  }
} catch (...) {
}

void Swap::end_saves(const Device& device, Side& side) noexcept {
  try {
    DeviceScope scope(device);
    side.saves.clear();
    side.reserve.reset();
  } catch (...) {
    side.saves.clear();  // without a context nothing is in flight
    side.reserve.reset();
  }
}

bool Swap::undo(bool whole) noexcept {
  for (auto& [device, side] : sides_) {
    whole &= take_back(*device, side);
  }
  for (auto& [device, side] : sides_) {
    if (!whole) keep_paused(*device, side);
    end_saves(*device, side);
    for (Step* step : side.into) roll_back(*step);
    for (Hand& hand : side.plan.hands) hand.memory = PhysicalMemory();
  }
  hold_->lock();
  for (Step& step : out_) {
    step.pool->heap.commit_extents(step.mappings);
    if (whole) continue;
    step.pool->parked.swap(step.pages);
    step.pool->saved.swap(step.ranges);
  }
  for (Step& step : into_) {
    step.pool->heap.commit_extents(step.mappings);
    step.pool->parked.swap(step.pages);
  }
  if (!whole) going_.commit();
  hold_->unlock();
  sides_.clear();
  return whole;
}

// Exchanges, and unmaps what nobody took over; or nothing, with the error.
void Swap::exchange_all(bool beyond) {
  // The tiles are what every plan starts from.
  std::vector<std::vector<Range>> tiles;
  for (const Step& step : into_) tiles.push_back(step.tiles);
  Error starved(Status::kOutOfHostMemory, kNoMemory);
  hold_->lock();
  for (Step& step : out_) step.mappings = step.pool->heap.take_all_extents();
  for (Step& step : into_) step.pages.swap(step.pool->parked);
  hold_->unlock();
  bool clean = true;
  const auto give_up = [&] {
    const bool whole = undo(clean);
    for (size_t i = 0; i < into_.size(); ++i) into_[i].tiles.swap(tiles[i]);
    return whole;
  };
  try {
    exchange(beyond);
    Error failure(Status::kOutOfHostMemory, kNoMemory);
    if (!unmap_all(out_, &failure, &clean)) throw failure;
  } catch (Error& error) {
    if (!give_up()) error.addition = kNotUndone;
    throw;
  } catch (...) {  // no host memory
    if (give_up()) throw;
    starved.addition = kNotUndone;
    throw std::move(starved);
  }
}

std::vector<Change> Swap::execute() {
  std::vector<Tag*> changed = going_.tags();
  changed.insert(changed.end(), coming_.tags().begin(), coming_.tags().end());
  std::optional<ProfileRange> profile;
  if (!changed.empty()) {
    profile.emplace("swap", [&] { return names_of(changed); }, device_bytes(out_));
  }
  Device::drain_active();
  collect_all_strays(out_);
  collect_all_strays(into_);
  prepare_stores(*hold_, out_);
  for (Step& step : out_) {
    step.access = step.device().access();
    step.pages.reserve(step.pool->heap.extents().size());
  }
  try {
    exchange_all(false);
  } catch (const Error& error) {
    const bool refused =
        error.status == Status::kOutOfDeviceMemory && error.call == std::string("cuMemCreate");
    if (!refused || going_.is_committed()) throw;
    progress_.done_bytes = progress_.total_bytes = 0;  // it is all done anew
    try {
      exchange_all(true);  // with pages that are larger than needed
    } catch (const Error& again) {
      if (again.status != Status::kOutOfDeviceMemory || again.call != std::string("cuMemCreate") ||
          !short_of_) {
        throw;
      }
      Error shortage = Registry::instance()
                           .shortage("swapping in " + format_names(names_of(coming_.tags())) +
                                         ", beside the pages that fit,",
                                     *short_of_, missing_bytes_)
                           .with_tag(again.tag);
      shortage.addition = going_.is_committed() ? kNotUndone : kInTurn;
      throw shortage;
    }
  }

  release_all(out_);
  for (auto& [device, side] : sides_) end_saves(*device, side);

  hold_->lock();
  for (Step& step : out_) {
    step.pages.clear();
    step.pool->saved.swap(step.ranges);
  }
  for (Step& step : into_) {
    step.pages.clear();  // places only: the memory is mapped
    step.pool->heap.commit_extents(step.mappings);
    step.pool->retained.swap(step.pool->saved);
    step.pool->saved.clear();
    step.device_bytes = step.pool->heap.resident_bytes();  // may be more than the plan
  }
  tally(out_, true);
  tally(into_, false);
  going_.commit();
  coming_.commit();
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  going_.count(seconds);
  coming_.count(seconds);
  hold_->unlock();
  fill_rows(rows_, out_);
  fill_rows(rows_, into_);
  return std::move(rows_);
}

}  // namespace

std::unique_ptr<Transition> begin_swap(const std::vector<std::string>& out,
                                       const std::vector<std::string>& into,
                                       std::optional<Backup> policy, const std::vector<Range>& dead,
                                       std::optional<uint64_t> seen) {
  if (out.empty() || into.empty()) {
    throw Error(Status::kInvalidArgument,
                "a swap needs a tag that goes out and one that comes in; for one of them alone "
                "there are pause and resume");
  }
  check_options();
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  const std::vector<Tag*> leaving = registry.select(out), entering = registry.select(into);
  for (Tag* tag : leaving) {
    if (std::find(entering.begin(), entering.end(), tag) == entering.end()) continue;
    throw Error(Status::kInvalidArgument,
                "tag " + quoted(tag->name) + " cannot go out and come in with one swap")
        .with_tag(tag->name);
  }
  std::vector<Tag*> all = leaving;
  all.insert(all.end(), entering.begin(), entering.end());
  auto hold = std::make_unique<Hold>(std::move(lock), std::move(all), Need::kTransition);
  std::vector<Tag*> going = changing(leaving, State::kPaused);
  std::vector<Tag*> coming = changing(entering, State::kMapped);
  const bool trust_dead = !seen || *seen == registry.changes.load();
  std::vector<Step> steps = plan_pause(going, policy, dead, trust_dead);
  std::vector<Step> others = plan_resume(coming, option(Option::share_bytes));
  std::vector<Tag*> changed = going;
  changed.insert(changed.end(), coming.begin(), coming.end());
  std::vector<Change> rows = plan_rows(hold->tags(), changed);
  Hold& held = *hold;
  held.keep_only(changed);
  auto swap = std::make_unique<Swap>(std::move(hold), std::move(going), std::move(coming),
                                     std::move(rows), std::move(steps), std::move(others));
  held.unlock();
  return swap;
}

}  // namespace memsaver
