// The stress thread's transitions of tags.
#include <algorithm>
#include <cstring>
#include <set>
#include <shared_mutex>
#include <thread>

#include "thread.h"

namespace stress {

// A transition whose tags are locked during this object's life.
struct Thread::Asked {
  Asked(World& world, std::vector<size_t> out_tags, std::vector<size_t> into_tags)
      : out(std::move(out_tags)), into(std::move(into_tags)) {
    std::set<size_t> all(out.begin(), out.end());
    all.insert(into.begin(), into.end());
    for (size_t i : all) locks.emplace_back(world.tags[i]->contents);
    for (size_t i : out) out_names.push_back(world.tags[i]->name.c_str());
    for (size_t i : into) into_names.push_back(world.tags[i]->name.c_str());
  }

  bool swaps() const { return !out.empty() && !into.empty(); }

  std::vector<size_t> out, into;
  std::vector<std::unique_lock<std::shared_mutex>> locks;
  std::vector<const char*> out_names, into_names;
  int backup = MS_BACKUP_DEFAULT;
  std::vector<ms_range> dead;
  std::vector<Block*> dying;  // this thread's blocks in `dead`

  ms_transition* transition = nullptr;
  ms_change* rows = nullptr;
  size_t row_count = 0;
  ms_status status = MS_OK;
  ms_error error{};
};

void Thread::choose_dead(Asked& asked) {
  for (Block& block : blocks_) {
    const auto of = static_cast<size_t>(block.tag);
    const bool goes = std::find(asked.out.begin(), asked.out.end(), of) != asked.out.end();
    if (!goes || tag_of(block).paused || !one_in(4)) continue;
    asked.dead.push_back({reinterpret_cast<uint64_t>(block.pointer), block.bytes});
    asked.dying.push_back(&block);
  }
}

ms_status Thread::begin(Asked& asked) {
  return ms_transition_begin(asked.out_names.data(), asked.out_names.size(),
                             asked.into_names.data(), asked.into_names.size(), asked.backup,
                             asked.dead.data(), asked.dead.size(), nullptr, &asked.transition,
                             &asked.error);
}

// Returns one of this thread's blocks on a device that the transition resumes, or null.
Block* Thread::arriving_block(const Asked& asked, size_t device) {
  for (Block& block : blocks_) {
    const auto of = static_cast<size_t>(block.tag);
    if (asked.into.empty() || asked.into.front() != of) continue;
    if (static_cast<size_t>(block.device) == device && tag_of(block).paused) return &block;
  }
  return nullptr;
}

// Runs the transition on another thread while this thread makes the calls of a waiting program.
void Thread::run_beside(Asked& asked) {
  ms_transition_hand_over(asked.transition, nullptr);
  std::thread runner([&asked] {
    asked.status = ms_transition_run(asked.transition, &asked.rows, &asked.row_count, &asked.error);
  });
  uint64_t done = 0, total = 0;
  for (uint64_t i = below(20); i > 0; --i) {
    ms_transition_progress(asked.transition, &done, &total);
    std::this_thread::yield();
  }
  const size_t device = below(kDevices);
  Block* const arriving = arriving_block(asked, device);
  const bool for_block = arriving && one_in(2);  // not for the whole transition
  const bool on_host = for_block && one_in(2);
  const ms_range range{arriving ? reinterpret_cast<uint64_t>(arriving->pointer) : 0,
                       arriving ? arriving->bytes : 0};
  void* const stream = streams_[device];
  ms_error error{};
  const ms_status status = for_block
                               ? ms_transition_wait_ranges(asked.transition, &range, 1,
                                                           on_host ? nullptr : &stream, &error)
                               : ms_transition_wait_stream(asked.transition, stream, &error);
  const bool waited = fine(status, error, "to wait for a transition", {MS_INVALID_STATE});
  if (waited && on_host) {
    require_contents(*arriving, arriving->pointer);
  } else if (waited && arriving && asked.out.empty()) {
    // Work that is queued from now on runs after the copies into the block.
    fill_later(*arriving);
    arriving->losses = tag_of(*arriving).losses;
  }
  runner.join();
}

// Updates the model after a transition was run.
void Thread::note(const Asked& asked) {
  const bool done = asked.status == MS_OK;
  for (size_t i = 0; done && i < asked.row_count; ++i) {
    const ms_change& row = asked.rows[i];
    for (size_t of : asked.out) {
      const Tag& tag = *world_.tags[of];
      if (tag.name == row.tag && row.device >= 0 && (row.changed != 0) == tag.paused) {
        world_.fail(tag.name + ": a pause's report does not match its effect");
      }
    }
  }
  for (Block* block : asked.dying) {
    block->filling = done ? Filling::kByte : asked.swaps() ? Filling::kUnknown : block->filling;
    if (done) block->value = world_.lost;
    if (done) block->losses = tag_of(*block).losses + 1;  // includes this pause's loss
  }
  for (size_t of : asked.out) {
    Tag& tag = *world_.tags[of];
    if (tag.paused) continue;
    const int policy = asked.backup == MS_BACKUP_DEFAULT ? tag.policy : asked.backup;
    if (done && policy == MS_BACKUP_NONE) ++tag.losses;
    if (!done && asked.swaps() && policy == MS_BACKUP_NONE) tag.doubts = ++tag.losses;
    // Faults may also hit the rollback: then the tag is paused, and has lost nothing.
    const bool stuck = std::strstr(asked.error.message, "could not be") != nullptr;
    tag.paused = done || stuck;
  }
  for (size_t of : asked.into) {
    if (done) world_.tags[of]->paused = false;
  }
}

void Thread::check_states(const Asked& asked) {
  for (const auto* side : {&asked.out, &asked.into}) {
    for (size_t of : *side) {
      const Tag& tag = *world_.tags[of];
      int state = -1;
      ms_error error{};
      fine(ms_tag_state(tag.name.c_str(), &state, &error), error, "ms_tag_state", {});
      if (state != (tag.paused ? MS_PAUSED : MS_MAPPED)) {
        world_.fail(tag.name + " is in state " + std::to_string(state));
      }
    }
  }
}

bool Thread::transit(std::vector<size_t> out, std::vector<size_t> into, bool background) {
  Asked asked(world_, std::move(out), std::move(into));
  if (!asked.out.empty()) {
    if (one_in(4)) asked.backup = static_cast<int>(below(5));
    choose_dead(asked);
  }
  if (!fine(begin(asked), asked.error, "to begin a transition",
            {MS_INVALID_STATE, MS_TAG_SHARED})) {
    check_states(asked);
    return false;
  }
  if (one_in(4)) ms_transition_set_caller(asked.transition, "the stress", nullptr);
  if (one_in(16)) {  // cancelled before its run
    ms_transition_free(asked.transition);
    check_states(asked);
    return true;
  }
  if (background) {
    run_beside(asked);
  } else {
    asked.status = ms_transition_run(asked.transition, &asked.rows, &asked.row_count, &asked.error);
  }
  ms_transition_free(asked.transition);
  note(asked);
  ms_list_free(asked.status == MS_OK ? asked.rows : nullptr);
  check_states(asked);
  return fine(asked.status, asked.error, "a transition",
              {MS_OUT_OF_DEVICE_MEMORY, MS_OUT_OF_HOST_MEMORY});
}

std::vector<size_t> Thread::some_tags(size_t from, size_t step) {
  std::vector<size_t> some;
  for (size_t i = from; i < world_.tags.size(); i += step) {
    if (one_in(3)) some.push_back(i);
  }
  if (some.empty()) some.push_back(from);
  return some;
}

bool Thread::pause() { return transit(some_tags(below(2), 2), {}, false); }

bool Thread::resume() { return transit({}, some_tags(below(2), 2), one_in(4)); }

bool Thread::swap() {
  const size_t side = below(2);
  return transit(some_tags(side, 2), some_tags(1 - side, 2), one_in(2));
}

bool Thread::in_background() {
  const std::vector<size_t> tags = some_tags(below(2), 2);
  return transit(tags, {}, true) && transit({}, tags, true);
}

bool Thread::everything() {
  std::vector<size_t> all;
  for (size_t i = 0; i < world_.tags.size(); ++i) all.push_back(i);
  const bool paused = transit(all, {}, one_in(2));
  return transit({}, all, one_in(2)) && paused;
}

}  // namespace stress
