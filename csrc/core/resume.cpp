#include "core/resume.h"

#include <chrono>
#include <functional>
#include <mutex>

#include "core/driver.h"
#include "core/options.h"
#include "core/profile.h"
#include "core/step.h"
#include "core/text.h"

namespace memsaver {
namespace {

using Clock = std::chrono::steady_clock;

class Resume : public Transition {
 public:
  Resume(std::unique_ptr<Hold> hold, std::vector<Tag*> tags, std::vector<Change> rows,
         std::vector<Step> steps)
      : Transition(std::move(hold), std::move(rows), Act::kResume),
        state_(*hold_, std::move(tags), State::kRestoring, label_),
        steps_(std::move(steps)) {}

 private:
  std::vector<Change> execute() override;
  uint64_t moved_bytes() const noexcept override { return device_bytes(steps_); }
  void end(Outcome outcome) noexcept override { state_.end(outcome); }
  void map_and_copy();
  void map_and_copy_on(std::vector<Step*>& own, const Step*& at,
                       const std::function<void(Device&)>& queued);
  void undo() noexcept;

  const Clock::time_point start_ = Clock::now();
  StateChange state_;
  std::vector<Step> steps_;
};

// Maps one device's memory, and queues what goes into it. Then waits until all is there, having
// called `queued` before.
void Resume::map_and_copy_on(std::vector<Step*>& own, const Step*& at,
                             const std::function<void(Device&)>& queued) {
  Device& device = own.front()->device();
  std::vector<std::pair<Step*, std::unique_ptr<Restore>>> restores;
  for (Step* step : own) {
    at = step;
    Restore* restore = nullptr;
    if (!step->ranges.empty()) {
      restores.emplace_back(
          step, std::make_unique<Restore>(step->device(), *step->pool->backup, step->pool->saved,
                                          step->ranges, progress_));
      restore = restores.back().second.get();
    }
    const auto mapped = [&](const Range& range) {
      if (restore) restore->queue(range);
    };
    map_step(*step, mapped);
  }
  for (auto& [step, restore] : restores) {
    at = step;
    restore->run_staged();
  }
  queued(device);
  for (auto& [step, restore] : restores) {
    at = step;
    step->copied_bytes = restore->finish();
  }
  if (own.front()->poison) {
    CU_CHECK(cuStreamSynchronize, device.copy_stream(Device::Direction::kToDevice));
  }
}

void Resume::map_and_copy() {
  std::mutex mutex;
  std::vector<Event> events;
  size_t devices = 0;
  for (size_t i = 0; i < steps_.size(); ++i) {
    bool first = true;
    for (size_t j = 0; j < i; ++j) first &= &steps_[j].device() != &steps_[i].device();
    devices += first;
  }
  const auto queued = [&](Device& device) {
    Event event = Event::create(device);
    event.record(device.copy_stream(Device::Direction::kToDevice));
    std::lock_guard<std::mutex> lock(mutex);
    events.push_back(std::move(event));
    if (events.size() == devices) announce_queued(std::move(events));
  };
  on_each_device(steps_, [&](std::vector<Step*>& own, const Step*& at) {
    try {
      map_and_copy_on(own, at, queued);
    } catch (...) {  // fills that are queued must not meet memory that is gone
      if (own.front()->poison) settle(own.front()->device(), Device::Direction::kToDevice);
      throw;
    }
  });
}

void Resume::undo() noexcept {
  if (withdraw()) {
    try {
      Device::drain_active();  // streams that waited may have gone on
    } catch (...) {
    }
  }
  for (Step& step : steps_) roll_back(step);
  hold_->lock();
  for (Step& step : steps_) {
    step.pool->heap.commit_extents(step.mappings);
    step.pool->parked.swap(step.pages);
  }
  hold_->unlock();
}

// The error of a resume, with what the caller needs to know.
[[noreturn]] void rethrow_as_shortage(const Error& error, const std::vector<Tag*>& tags,
                                      const std::vector<Step>& steps) {
  const Step* at = nullptr;
  for (const Step& step : steps) {
    if (step.pool->tag.name == error.tag && (!at || step.device_bytes > at->device_bytes)) {
      at = &step;
    }
  }
  if (!at) throw error;
  uint64_t needed = 0;
  for (const Step& step : steps) {
    if (&step.device() == &at->device()) needed += step.device_bytes;
  }
  throw Registry::instance()
      .shortage("resuming " + format_names(names_of(tags)), at->device(), needed)
      .with_tag(error.tag);
}

std::vector<Change> Resume::execute() {
  std::optional<ProfileRange> profile;
  if (!steps_.empty()) {
    profile.emplace("resume", [this] { return names_of(state_.tags()); }, device_bytes(steps_));
  }
  collect_all_strays(steps_);
  hold_->lock();
  for (Step& step : steps_) step.pages.swap(step.pool->parked);
  hold_->unlock();
  try {
    map_and_copy();
  } catch (const Error& error) {
    undo();
    if (error.status == Status::kOutOfDeviceMemory && error.call == std::string("cuMemCreate")) {
      rethrow_as_shortage(error, state_.tags(), steps_);
    }
    throw;
  } catch (...) {
    undo();
    throw;
  }

  hold_->lock();
  for (Step& step : steps_) {
    step.pages.clear();  // places only: the memory is mapped
    step.pool->heap.commit_extents(step.mappings);
    step.pool->retained.swap(step.pool->saved);
    step.pool->saved.clear();
  }
  state_.commit();
  tally(steps_, false);
  state_.count(std::chrono::duration<double>(Clock::now() - start_).count());
  hold_->unlock();
  fill_rows(rows_, steps_);
  return std::move(rows_);
}

}  // namespace

std::unique_ptr<Transition> begin_resume(const std::vector<std::string>& names) {
  check_options();
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  std::vector<Tag*> selected = registry.select(names);
  auto hold = std::make_unique<Hold>(std::move(lock), std::move(selected), Need::kTransition);
  std::vector<Tag*> tags = changing(hold->tags(), State::kMapped);
  std::vector<Step> steps = plan_resume(tags, option(Option::share_bytes));
  std::vector<Change> rows = plan_rows(hold->tags(), tags);
  Hold& held = *hold;
  held.keep_only(tags);
  auto resume =
      std::make_unique<Resume>(std::move(hold), std::move(tags), std::move(rows), std::move(steps));
  held.unlock();
  return resume;
}

}  // namespace memsaver
