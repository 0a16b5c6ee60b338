#include "core/transition/device_transition.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/backup/fingerprint.h"
#include "core/driver/driver.h"
#include "core/platform/workers.h"

namespace memsaver {
namespace {

// A NaN in float64, float32, bfloat16, float16 and both common formats of 8 bits (e4m3fn, e5m2);
// -1 in integers.
constexpr unsigned char kPoison = 0xFF;

// The number of pages ahead of the current transfer for which copies are queued.
constexpr size_t kAhead = 2;

// Removes the entries of mappings and pages that own nothing.
void drop_empty(PoolChange& change) noexcept {
  for (auto at = change.mappings.begin(); at != change.mappings.end();) {
    at = at->second.bytes() == 0 ? change.mappings.erase(at) : std::next(at);
  }
  std::vector<UnmappedPage>& pages = change.unmapped_pages;
  pages.erase(std::remove_if(pages.begin(), pages.end(),
                             [](const UnmappedPage& page) { return page.memory.bytes() == 0; }),
              pages.end());
}

}  // namespace

uint64_t DeviceTransition::new_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [to, tiles] : plan_.memory) bytes += total(tiles);
  return bytes;
}

void DeviceTransition::plan(bool allow_larger) {
  plan_ = plan_page_transfers(out_, into_, allow_larger);
  size_t pages = 0;
  for (Leaving* from : out_) {
    const size_t extents = from->pool->heap.extents().size();
    pages += extents;
    from->unmapped_pages.reserve(extents);
    from->transferred.reserve(from->ranges.size() + plan_.transfers.size());
  }
  for (Arriving* to : into_) {
    const std::vector<Range>& tiles = plan_.memory[to];
    pages += tiles.size() + to->pool->unmapped_pages.size();
    to->device_bytes = total(tiles);
  }
  for (const PageTransfer& transfer : plan_.transfers) {
    transfer.to->device_bytes += transfer.bytes;
  }
  journal_.reserve(pages, device_.access());
  filling_ = false;
  at_ = nullptr;
}

void DeviceTransition::take_pages() noexcept {
  for (const PageTransfer& transfer : plan_.transfers) {
    transfer.from->pool->heap.take_extent(transfer.page, transfer.from->mappings);
  }
  for (Arriving* to : into_) to->unmapped_pages.swap(to->pool->unmapped_pages);
}

void DeviceTransition::take_rest() noexcept {
  for (Leaving* from : out_) {
    std::map<uint64_t, Mapping> rest = from->pool->heap.take_all_extents();
    from->mappings.merge(rest);
  }
  at_ = nullptr;
}

void DeviceTransition::exchange(const Queued& queued) {
  try {
    exchange_pages(queued);
    restores_.clear();
  } catch (...) {  // copies and fills in flight must not access memory that is unmapped
    restores_.clear();
    for (auto& [from, save] : saves_) save->stop();
    if (filling_) wait_for_copies(device_, Device::Direction::kToDevice);
    throw;
  }
}

void DeviceTransition::exchange_pages(const Queued& queued) {
  reserve_undo();
  if (out_.empty()) events_.emplace(device_);  // a swap may fail after its copies are queued
  // New memory first: if the driver refuses it, nothing has changed yet.
  for (Arriving* to : into_) map(*to);
  start_saves();
  transfer_pages();
  for (auto& [from, save] : saves_) {
    at_ = &from->pool->tag;
    from->copied_bytes = save->finish();
    from->unchanged = save->unchanged();
  }
  // Contents without a backup are overwritten last, because they cannot be restored.
  for (const PageTransfer& transfer : plan_.transfers) {
    if (save_of(transfer.from)) continue;
    at_ = &transfer.to->pool->tag;
    restore(transfer.to, {transfer.at, transfer.bytes});
  }
  for (auto& [to, restore] : restores_) {
    at_ = &to->pool->tag;
    restore->run_staged();
  }
  if (events_) {
    events_->close();
    queued(std::move(*events_));
    events_.reset();
  }
  for (auto& [to, restore] : restores_) {
    at_ = &to->pool->tag;
    to->copied_bytes = restore->finish();
  }
  if (filling_) {
    CU_CHECK(cuStreamSynchronize, device_.copy_stream(Device::Direction::kToDevice));
  }
}

// Throws kOutOfHostMemory, kDriverFailed.
void DeviceTransition::reserve_undo() {
  uint64_t bytes = 0;
  if (!plan_.transfers.empty()) device_.copy_stream(Device::Direction::kToDevice);
  for (const PageTransfer& transfer : plan_.transfers) {
    const Leaving& from = *transfer.from;
    if (from.ranges.empty() || from.pool->backup->is_direct()) continue;
    at_ = &from.pool->tag;
    bytes = std::max(bytes, staged_bytes(from.ranges));
    if (from.pool->backup->kind() == Backup::kDisk) fingerprint_of("", 0);  // makes its table
  }
  if (bytes == 0) return;
  staging_ = std::make_unique<StagingBuffer>(device_, HostClaim::take(bytes, HostUse::kStaging));
}

void DeviceTransition::map(Arriving& to) {
  at_ = &to.pool->tag;
  if (!to.ranges.empty()) {
    restores_.emplace(&to, std::make_unique<Restore>(device_, *to.pool->backup, to.pool->saved,
                                                     to.ranges, progress_, staging_.get()));
  }
  const auto found = restores_.find(&to);
  Restore* const restore = found == restores_.end() ? nullptr : found->second.get();
  const bool adds_events = restore && to.pool->backup->is_direct();
  CopyEvents* const events = events_ ? &*events_ : nullptr;
  const auto queue = [&](const Range& mapped) {
    if (restore) restore->queue(mapped, events);
    if (!events || adds_events) return;
    if (to.poison) {
      events->add(mapped);
    } else {
      events->add_without_work(mapped);
    }
  };
  for (const auto& [address, extent] : to.pool->heap.extents()) queue({address, extent.bytes()});
  for (const Range& tile : plan_.memory.at(&to)) {
    journal_.map_new(to, tile);
    if (to.poison) fill_unrestored(to, tile);  // else new memory is zero
    queue(tile);
  }
  for (UnmappedPage& page : to.unmapped_pages) {
    const Range range{page.address, page.memory.bytes()};
    journal_.map_again(to, page);
    queue(range);
  }
}

void DeviceTransition::start_saves() {
  for (Leaving* from : out_) {
    if (from->ranges.empty()) continue;
    at_ = &from->pool->tag;
    auto save = std::make_unique<Save>(device_, *from->pool->backup, from->pool->heap.spans(),
                                       from->ranges, progress_, staging_.get());
    if (plan_.transfers.empty()) save->queue(UINT64_MAX);
    saves_.emplace(from, std::move(save));
  }
}

// Transfers each page. A page of a tag with a backup is transferred as soon as its bytes are saved.
void DeviceTransition::transfer_pages() {
  const std::vector<PageTransfer>& transfers = plan_.transfers;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const PageTransfer& transfer = transfers[i];
    Save* const save = save_of(transfer.from);
    if (save) {
      at_ = &transfer.from->pool->tag;
      for (size_t next = i; next <= i + kAhead && next < transfers.size(); ++next) {
        if (transfers[next].from == transfer.from) save->queue(transfers[next].end());
      }
      save->wait(transfer.end());
    }
    at_ = &transfer.to->pool->tag;
    journal_.transfer(transfer);
    if (save) restore(transfer.to, {transfer.at, transfer.bytes});
  }
}

Save* DeviceTransition::save_of(Leaving* from) const {
  const auto found = saves_.find(from);
  return found == saves_.end() ? nullptr : found->second.get();
}

// Writes the contents of a transferred page: zeros or poison, and the restored bytes.
void DeviceTransition::restore(Arriving* to, const Range& mapped) {
  fill_unrestored(*to, mapped);
  const auto found = restores_.find(to);
  if (found != restores_.end()) found->second->queue(mapped);
}

void DeviceTransition::fill_unrestored(const Arriving& to, const Range& mapped) {
  CUstream stream = device_.copy_stream(Device::Direction::kToDevice);
  const unsigned char value = to.poison ? kPoison : 0;
  for (const Range& gap : subtract({mapped}, within(to.ranges, mapped))) {
    filling_ = true;
    CU_CHECK(cuMemsetD8Async, gap.address, value, gap.bytes, stream);
  }
}

void DeviceTransition::unmap() {
  for (Leaving* from : out_) {
    at_ = &from->pool->tag;
    for (auto& [address, mapping] : from->mappings) {
      if (mapping.bytes() != 0) journal_.unmap(*from, address, mapping);
    }
  }
}

void DeviceTransition::release() noexcept {
  journal_.release();
  journal_.close();
  saves_.clear();
  staging_.reset();
}

bool DeviceTransition::undo() noexcept try {
  if (!journal_.undo()) return false;
  restore_transferred();
  return true;
} catch (...) {
  return false;
}

// Restores the bytes of transferred pages, which other contents may have overwritten.
void DeviceTransition::restore_transferred() {
  for (const Leaving* from : out_) {
    if (from->transferred.empty()) continue;
    DeviceScope scope(device_);
    restore_now(device_, *from->pool->backup, from->transferred, staging_.get());
  }
}

void DeviceTransition::finish_undo(bool whole) noexcept {
  std::optional<DeviceScope> scope;
  try {
    if (!saves_.empty() || staging_) scope.emplace(device_);
  } catch (...) {
    // Without a context no work is in flight.
  }
  if (!whole) {
    for (auto& [from, save] : saves_) save->keep();
    journal_.give_up_transferred();
  }
  saves_.clear();
  staging_.reset();
  for (Leaving* from : out_) drop_empty(*from);
  for (Arriving* to : into_) drop_empty(*to);
  journal_.close();
}

void on_each_device(const std::vector<std::unique_ptr<DeviceTransition>>& works,
                    const std::function<void(DeviceTransition&)>& call) {
  run_in_parallel(works.size(), [&](size_t i) {
    DeviceTransition& work = *works[i];
    try {
      DeviceScope scope(work.device());
      call(work);
    } catch (Error& error) {
      if (work.failed_at() && error.tag.empty()) error.tag = work.failed_at()->name;
      throw;
    }
  });
}

}  // namespace memsaver
