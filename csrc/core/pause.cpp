#include "core/pause.h"

#include <chrono>

#include "core/options.h"
#include "core/profile.h"
#include "core/step.h"

namespace memsaver {
namespace {

using Clock = std::chrono::steady_clock;

class Pause : public Transition {
 public:
  Pause(std::unique_ptr<Hold> hold, std::vector<Tag*> tags, std::vector<Change> rows,
        std::vector<Step> steps)
      : Transition(std::move(hold), std::move(rows), Act::kPause),
        state_(*hold_, std::move(tags), State::kSaving, label_),
        steps_(std::move(steps)) {}

 private:
  std::vector<Change> execute() override;
  uint64_t moved_bytes() const noexcept override { return device_bytes(steps_); }
  void end(Outcome outcome) noexcept override { state_.end(outcome); }

  const Clock::time_point start_ = Clock::now();
  StateChange state_;
  std::vector<Step> steps_;
};

std::vector<Change> Pause::execute() {
  std::optional<ProfileRange> profile;
  if (!steps_.empty()) {
    profile.emplace("pause", [this] { return names_of(state_.tags()); }, device_bytes(steps_));
    Device::drain_active();
  }
  collect_all_strays(steps_);
  prepare_stores(*hold_, steps_);
  save_all(steps_, progress_);

  // All that needs host memory comes first: from here to the commit nothing does.
  fill_rows(rows_, steps_);
  for (Step& step : steps_) {
    step.access = step.device().access();
    step.pages.reserve(step.pool->heap.extents().size());
  }
  Error failure(Status::kOutOfHostMemory, kNoMemory);
  bool clean = true;

  hold_->lock();
  for (Step& step : steps_) step.mappings = step.pool->heap.take_all_extents();
  hold_->unlock();
  const bool unmapped = unmap_all(steps_, &failure, &clean);
  if (unmapped) release_all(steps_);  // the memory goes back to the driver
  hold_->lock();
  for (Step& step : steps_) {
    step.pool->heap.commit_extents(step.mappings);
    step.pool->parked.swap(step.pages);
    if (unmapped) step.pool->saved.swap(step.ranges);
  }
  if (unmapped || !clean) state_.commit();
  if (!clean) {
    failure.addition =
        "; and pages already unmapped could not be mapped again: the tags are paused, with their "
        "pages held and their contents intact; resume them, then pause again";
  }
  if (unmapped) {
    tally(steps_, true);
    state_.count(std::chrono::duration<double>(Clock::now() - start_).count());
  }
  hold_->unlock();
  if (!unmapped) throw failure;
  return std::move(rows_);
}

}  // namespace

std::unique_ptr<Transition> begin_pause(const std::vector<std::string>& names,
                                        std::optional<Backup> policy,
                                        const std::vector<Range>& dead,
                                        std::optional<uint64_t> seen) {
  check_options();
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::vector<Tag*> selected = registry.select(names);
  auto hold = std::make_unique<Hold>(std::move(lock), std::move(selected), Need::kTransition);
  std::vector<Tag*> tags = changing(hold->tags(), State::kPaused);
  // What was dead when the caller looked may be another tensor's by now: then everything is saved.
  const bool trust_dead = !seen || *seen == registry.changes.load();
  std::vector<Step> steps = plan_pause(tags, policy, dead, trust_dead);
  std::vector<Change> rows = plan_rows(hold->tags(), tags);
  Hold& held = *hold;
  held.keep_only(tags);
  auto pause =
      std::make_unique<Pause>(std::move(hold), std::move(tags), std::move(rows), std::move(steps));
  held.unlock();
  return pause;
}

}  // namespace memsaver
