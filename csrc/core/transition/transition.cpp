#include "core/transition/transition.h"

#include <atomic>
#include <map>
#include <new>
#include <optional>
#include <utility>

#include "core/driver/deferred_release.h"
#include "core/driver/driver.h"
#include "core/memory/importer.h"
#include "core/platform/options.h"
#include "core/platform/profile.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

constexpr const char* kNotUndone =
    "; the transition could not be undone: the tags that it was to pause are paused, with all "
    "their contents in their backups or in retained pages; resume them";

constexpr const char* kInTurn = "; pausing one tag and then resuming the other needs less memory";

const char* name_of(Act act) {
  switch (act) {
    case Act::kPause:
      return "pause";
    case Act::kResume:
      return "resume";
    default:
      return "swap";
  }
}

std::vector<std::unique_ptr<DeviceTransition>> by_device(std::vector<Leaving>& out,
                                                         std::vector<Arriving>& into,
                                                         Progress& progress) {
  std::map<Device*, std::unique_ptr<DeviceTransition>> found;
  const auto of = [&](const PoolChange& change) -> DeviceTransition& {
    auto& work = found[&change.device()];
    if (!work) work = std::make_unique<DeviceTransition>(change.device(), progress);
    return *work;
  };
  for (Leaving& from : out) of(from).add(from);
  for (Arriving& to : into) of(to).add(to);
  std::vector<std::unique_ptr<DeviceTransition>> devices;
  for (auto& [device, work] : found) devices.push_back(std::move(work));
  return devices;
}

uint64_t bytes_of(const std::vector<Leaving>& out) noexcept {
  uint64_t bytes = 0;
  for (const Leaving& from : out) bytes += from.device_bytes;
  return bytes;
}

uint64_t bytes_of(const std::vector<Arriving>& into) noexcept {
  uint64_t bytes = 0;
  for (const Arriving& to : into) bytes += to.device_bytes;
  return bytes;
}

}  // namespace

std::unique_ptr<Transition> Transition::begin(const TransitionRequest& request) {
  check_options();
  std::unique_lock<std::mutex> lock(Registry::instance().mutex);
  const SelectedTags tags = select_tags(request);
  wait_for_importers(lock, tags.all(), tags.out);
  auto hold = std::make_unique<Hold>(std::move(lock), tags.all(), Need::kTransition);
  TransitionPlan plan = plan_transition(request, tags);
  std::vector<Tag*> changing = plan.out_tags;
  changing.insert(changing.end(), plan.into_tags.begin(), plan.into_tags.end());
  Hold& held = *hold;
  held.keep_only(changing);
  std::unique_ptr<Transition> begun(new Transition(std::move(hold), std::move(plan)));
  held.unlock();
  return begun;
}

Transition::Transition(std::unique_ptr<Hold> hold, TransitionPlan plan)
    : hold_(std::move(hold)),
      tags_(hold_->tags()),
      label_(plan.act),
      pausing_(*hold_, std::move(plan.out_tags), State::kSaving, label_),
      resuming_(*hold_, std::move(plan.into_tags), State::kRestoring, label_),
      rows_(std::move(plan.rows)),
      out_(std::move(plan.out)),
      into_(std::move(plan.into)),
      devices_(by_device(out_, into_, progress_)) {}

std::vector<Change> Transition::run() {
  require_not_run();
  hold_->lock();
  hold_->set_owner(this_thread());
  hold_->unlock();
  timeline::note_memory();
  try {
    execute();
  } catch (...) {
    end(false);
    throw;
  }
  end(true);
  return std::move(rows_);
}

void Transition::drain() {
  if (out_.empty() || is_drained_) return;
  Device::drain_active();
  is_drained_ = true;
}

void Transition::cancel() noexcept {
  if (hold_) end(false);
}

// Releases the tags. The outcome of a transition that succeeded is already recorded.
void Transition::end(bool succeeded) noexcept {
  pausing_.end(Outcome::kFailed);
  resuming_.end(Outcome::kFailed);
  hold_.reset();
  completion_.end(succeeded);
  timeline::note_memory();
}

void Transition::execute() {
  std::optional<ProfileRange> profile;
  if (!devices_.empty()) {
    profile.emplace(name_of(label_.act), [this] { return names_of(tags_); }, moved_bytes());
  }
  try {
    drain();
    retry_releases(Retry::kAll);
    prepare_stores();
    move_all();
  } catch (Error& error) {
    if (error.no_physical_memory) throw shortage(error);
    add_context(error);
    throw;
  }
  if (!out_.empty()) release();
  commit();
  fill_rows();
}

// Ensures that each pool that saves has a sound store of its policy. Throws like BackupStore::make.
void Transition::prepare_stores() {
  hold_->lock();
  for (Leaving& from : out_) from.pool->retained.clear();
  hold_->unlock();
  for (Leaving& from : out_) {
    if (from.ranges.empty()) continue;
    Pool& pool = *from.pool;
    if (pool.backup && pool.backup->kind() == from.policy && pool.backup->is_sound()) continue;
    std::unique_ptr<BackupStore> store;
    try {
      store = BackupStore::make(from.policy, from.device());
    } catch (Error& error) {
      error.tag = pool.tag.name;
      throw;
    }
    hold_->lock();  // statistics read the store's byte counts
    pool.backup.swap(store);
    hold_->unlock();
  }
}

void Transition::move_all() {
  try {
    move_or_undo(false);
    return;
  } catch (const Error& error) {
    if (!error.no_physical_memory || out_.empty() || pausing_.is_committed()) throw;
  }
  progress_.done_bytes = progress_.total_bytes = 0;
  move_or_undo(true);
}

void Transition::move_or_undo(bool allow_larger) {
  Error no_memory(Status::kOutOfHostMemory, "the process has no host memory left");
  try {
    move(allow_larger);
  } catch (Error& error) {
    distrust_backups();
    if (!undo()) error.addition = kNotUndone;
    throw;
  } catch (...) {  // no host memory
    if (undo()) throw;
    no_memory.addition = kNotUndone;
    throw std::move(no_memory);
  }
}

// If a restore failed on one device, it is unknown whether the tag's backups on other devices are
// complete: the next pause must not use any of them.
void Transition::distrust_backups() noexcept {
  for (const Arriving& failed : into_) {
    if (!failed.pool->backup || failed.pool->backup->is_sound()) continue;
    for (const Arriving& to : into_) {
      if (&to.pool->tag == &failed.pool->tag && to.pool->backup) to.pool->backup->distrust();
    }
  }
}

void Transition::move(bool allow_larger) {
  for (const auto& work : devices_) work->plan(allow_larger);
  hold_->lock();
  for (const auto& work : devices_) work->take_pages();
  hold_->unlock();
  std::mutex mutex;
  std::vector<CopyEvents> events;
  const auto queued = [&](CopyEvents device_events) {
    std::lock_guard<std::mutex> lock(mutex);
    events.push_back(std::move(device_events));
    if (events.size() == devices_.size()) completion_.set_queued(std::move(events));
  };
  on_each_device(devices_, [&](DeviceTransition& work) { work.exchange(queued); });
  if (out_.empty()) return;
  hold_->lock();
  for (const auto& work : devices_) work->take_rest();
  hold_->unlock();
  on_each_device(devices_, [](DeviceTransition& work) { work.unmap(); });
}

void Transition::release() noexcept {
  try {
    on_each_device(devices_, [](DeviceTransition& work) { work.release(); });
  } catch (...) {
    // No thread or context for the device: releasing memory needs neither.
  }
  for (const auto& work : devices_) work->release();
}

void Transition::commit() noexcept {
  hold_->lock();
  for (Leaving& from : out_) {
    Pool& pool = *from.pool;
    pool.saved.swap(from.ranges);
    pool.paused.add(from.device_bytes, from.copied_bytes);
    pool.last_unchanged = from.unchanged;
    pool.unchanged.pieces += from.unchanged.pieces;
    pool.unchanged.bytes += from.unchanged.bytes;
  }
  for (Arriving& to : into_) {
    Pool& pool = *to.pool;
    // A message from before this transition must not give access to pages of another tag.
    for (auto& [address, mapping] : to.mappings) mapping.renew_export_id();
    pool.heap.commit_extents(to.mappings);
    pool.retained.swap(pool.saved);
    pool.saved.clear();
    pool.resumed.add(to.device_bytes, to.copied_bytes);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  for (StateChange* change : {&pausing_, &resuming_}) {
    change->commit();
    change->count(seconds);
  }
  hold_->unlock();
}

// Returns whether all tags are unchanged. Needs no host memory.
bool Transition::undo() noexcept {
  if (completion_.withdraw()) {
    try {
      Device::drain_active();  // streams that waited may have continued
    } catch (...) {
    }
  }
  bool whole = true;
  for (const auto& work : devices_) whole &= work->undo();
  for (const auto& work : devices_) work->finish_undo(whole);
  hold_->lock();
  const auto restore = [](PoolChange& change) {
    change.pool->heap.commit_extents(change.mappings);
    // If the transition failed before it removed the pool's pages, the pool still has them.
    if (change.pool->unmapped_pages.empty()) {
      change.pool->unmapped_pages.swap(change.unmapped_pages);
    }
  };
  for (Leaving& from : out_) {
    restore(from);
    if (!whole) from.pool->saved.swap(from.transferred);
    from.transferred.clear();
  }
  for (Arriving& to : into_) restore(to);
  if (!whole) pausing_.commit();
  hold_->unlock();
  return whole;
}

void Transition::fill_rows() noexcept {
  const auto fill = [this](const PoolChange& change) {
    for (Change& row : rows_) {
      if (row.tag != &change.pool->tag || row.device != change.device().ordinal()) continue;
      row.device_bytes = change.device_bytes;
      row.copied_bytes = change.copied_bytes;
    }
  };
  for (const Leaving& from : out_) fill(from);
  for (const Arriving& to : into_) fill(to);
}

uint64_t Transition::moved_bytes() const noexcept {
  return out_.empty() ? bytes_of(into_) : bytes_of(out_);
}

// Returns the error for refused device memory, with the transition's tags and bytes.
Error Transition::shortage(const Error& refusal) const {
  for (const auto& work : devices_) {
    if (work->device().ordinal() != refusal.device) continue;
    const std::string tags = format_names(names_of(resuming_.tags()));
    const std::string what = out_.empty()
                                 ? "resuming " + tags
                                 : "swapping in " + tags + " (in addition to the pages that fit)";
    Error error = Registry::instance()
                      .shortage(what, work->device(), work->new_bytes())
                      .with_tag(refusal.tag);
    const bool undone = refusal.addition[0] == 0;
    error.addition = !undone ? refusal.addition : out_.empty() ? "" : kInTurn;
    return error;
  }
  return refusal;
}

// Adds the transition's tags and bytes to the message of an error, such as a driver call's. Needs
// host memory; without it, the message is left unchanged.
void Transition::add_context(Error& error) const noexcept {
  if (error.message.empty()) return;  // if out of memory: marshal.cpp writes the message
  try {
    error.message += std::string("; the ") + name_of(label_.act) + " of " +
                     format_names(names_of(tags_)) + ", " + format_bytes(moved_bytes()) +
                     ", failed";
    if (error.addition[0] == 0) error.message += " and was undone: it can be tried again";
  } catch (const std::bad_alloc&) {
  }
}

void Transition::require_not_run() const {
  if (!hold_) throw Error(Status::kInvalidState, "the transition has already run");
}

void Transition::set_caller(const std::string& caller) {
  require_not_run();
  const auto text = std::make_shared<const std::string>(caller);
  hold_->lock();
  for (Tag* tag : hold_->tags()) tag->current_transition.caller = text;
  hold_->unlock();
}

void Transition::hand_over() {
  require_not_run();
  hold_->lock();
  hold_->set_owner(0);
  hold_->unlock();
}

void Transition::wait_stream(CUstream stream) {
  if (tags_.empty()) return;  // it changes nothing
  completion_.wait_stream(tags_, stream);
}

void Transition::wait_ranges(const std::vector<Range>& ranges, const CUstream* stream) {
  if (tags_.empty()) return;  // it changes nothing
  completion_.wait_ranges(tags_, ranges, stream);
}

}  // namespace memsaver
