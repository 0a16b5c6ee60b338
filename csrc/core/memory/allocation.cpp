#include "core/memory/allocation.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "core/driver/driver.h"
#include "core/memory/importer.h"
#include "core/memory/timeline.h"
#include "core/platform/log.h"
#include "core/platform/options.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

// New blocks of 1/kLargeShare of the option slab_bytes or more get their own extents, so that small
// blocks do not keep their memory after they are freed.
constexpr uint64_t kLargeShare = 4;

// New extents for smaller blocks are sized to 1/kSlabShare of the bytes of such blocks.
constexpr uint64_t kSlabShare = 16;

struct ExtentSizes {
  uint64_t large_bytes;  // the smallest block with its own extents
  uint64_t slab_bytes;   // the size of the next extent for smaller blocks, at least a page
};

// The caller locks the registry.
ExtentSizes extent_sizes(const Heap& heap, bool shareable) {
  const uint64_t limit = option(Option::slab_bytes);
  if (!shareable) return {limit / kLargeShare, std::min(limit, heap.small_bytes() / kSlabShare)};
  // Importing takes time for each piece, so a shareable tag has few pieces, each sized to a share
  // of the tag's memory.
  const uint64_t large = std::max(limit, option(Option::share_bytes));
  return {large, std::min(large, heap.resident_bytes() / kSlabShare)};
}

// Maps new memory for the ranges. Also throws kOutOfDeviceMemory if less than the option
// margin_bytes would stay free.
std::map<uint64_t, Mapping> map_new(Device& device, const std::vector<Range>& ranges,
                                    bool exportable) {
  if (ranges.empty()) return {};
  const uint64_t margin = option(Option::margin_bytes);
  std::unique_lock<std::mutex> room;
  if (margin > 0) room = device.lock_room();
  if (margin > 0 && device.memory().free_bytes < total(ranges) + margin) {
    Error error(Status::kOutOfDeviceMemory, "");  // allocate() adds the needed bytes
    error.no_physical_memory = true;
    throw error;
  }
  const std::vector<CUmemAccessDesc> access = device.access();
  std::map<uint64_t, Mapping> mapped;
  for (const Range& range : ranges) {
    Mapping& mapping = mapped[range.address];
    mapping = Mapping::map(range.address, PhysicalMemory::create(device, range.bytes, exportable),
                           access);
  }
  return mapped;
}

// Unmaps and releases; extents that the driver refuses to unmap stay. Returns the first failure.
std::optional<Error> unmap_and_release(std::map<uint64_t, Mapping>& extents) noexcept {
  std::optional<Error> failure;
  for (auto at = extents.begin(); at != extents.end();) {
    try {
      at->second.unmap();
      at = extents.erase(at);
    } catch (Error& error) {
      if (!failure) failure = std::move(error);
      ++at;
    } catch (...) {
      if (!failure) failure.emplace(Status::kOutOfHostMemory, "");
      ++at;
    }
  }
  return failure;
}

// Completes the pending frees of one pool. The caller owns the tag's Hold; `lock` is locked on
// entry and exit. Throws if the devices cannot be drained or memory cannot be unmapped; the frees
// then stay pending, and their memory is still counted.
void complete_frees(std::unique_lock<std::mutex>& lock, Pool& pool) {
  while (!pool.heap.pending_frees().empty()) {
    const std::vector<uint64_t> blocks = pool.heap.pending_frees();
    const bool resident = pool.heap.resident_bytes() > 0;
    const std::vector<uint64_t> extents = pool.heap.plan_free(blocks);
    lock.unlock();
    if (resident) Device::drain_active();
    lock.lock();
    std::map<uint64_t, Mapping> taken = pool.heap.take_extents(extents);
    if (!taken.empty() && is_imported({&pool.tag})) request_release();
    lock.unlock();
    const std::optional<Error> failure = unmap_and_release(taken);
    lock.lock();
    pool.heap.commit_extents(taken);
    if (failure) {
      timeline::note(Record::Kind::kFree, pool);
      throw *failure;
    }
    pool.heap.commit_free(blocks);
    // Select the retained unmapped pages that no longer lie under any block.
    std::vector<PhysicalMemory> unused;
    std::vector<UnmappedPage>& pages = pool.unmapped_pages;
    for (size_t i = 0; i < pages.size();) {
      if (pool.heap.needs({pages[i].address, pages[i].memory.bytes()})) {
        ++i;
        continue;
      }
      unused.push_back(std::move(pages[i].memory));
      pages[i] = std::move(pages.back());
      pages.pop_back();
    }
    timeline::note(Record::Kind::kFree, pool);
    lock.unlock();
    unused.clear();
    lock.lock();
  }
}

// Grants the devices in use access to a pool's memory. If the driver refuses access to an extent,
// continues with the other extents and returns the first error. The caller owns the tag's Hold.
std::optional<Error> share_memory_of(const Pool& pool) try {
  const std::vector<CUmemAccessDesc> access = pool.heap.device().access();
  std::optional<Error> failure;
  for (const auto& [address, extent] : pool.heap.extents()) {
    try {
      extent.share(access);
    } catch (Error& error) {
      if (!failure) failure = std::move(error);
    }
  }
  return failure;
} catch (Error& error) {
  return std::move(error);
}

// Grants the devices in use access to a tag's memory. Returns whether they can access all of it. If
// waiting for the tag would deadlock, does nothing and returns false.
bool share_memory_of(Tag& tag) {
  std::unique_lock<std::mutex> lock(Registry::instance().mutex);
  if (would_wait_for_ever({&tag}, Need::kMemory)) return false;
  Hold hold(std::move(lock), {&tag});
  hold.unlock();  // only the owner of the Hold changes the pools
  bool all = true;
  for (const auto& [ordinal, pool] : tag.pools) {
    const std::optional<Error> failure = share_memory_of(pool);
    if (!failure) continue;
    warn("memory of tag " + quoted(tag.name) +
         " cannot be accessed by every device in use: " + failure->message);
    all = false;
  }
  return all;
}

}  // namespace

Hold::Hold(std::unique_lock<std::mutex> lock, std::vector<Tag*> tags, Need need)
    : lock_(std::move(lock)), tags_(std::move(tags)) {
  wait_for_tags(lock_, tags_, need);
  claim_.owner = this_thread();
  for (Tag* tag : tags_) tag->hold = &claim_;
}

Hold::~Hold() {
  if (!lock_.owns_lock()) lock_.lock();
  for (Tag* tag : tags_) {
    for (auto& [ordinal, pool] : tag->pools) {
      try {
        complete_frees(lock_, pool);
      } catch (const Error& error) {
        if (!lock_.owns_lock()) lock_.lock();
        if (is_shutdown(static_cast<CUresult>(error.cuda_error))) continue;
        warn_of([&] {
          return "freed memory of tag " + quoted(tag->name) +
                 " could not be released yet: " + error.message;
        });
      } catch (...) {
        // Out of host memory: the blocks stay pending free, and the next Hold tries again.
        if (!lock_.owns_lock()) lock_.lock();
      }
    }
    tag->hold = nullptr;
  }
  Registry::instance().changed.notify_all();
}

void Hold::keep_only(const std::vector<Tag*>& tags) {
  std::vector<Tag*> kept = tags;  // allocated before any tag is released
  for (Tag* tag : tags_) {
    const bool stays = std::find(tags.begin(), tags.end(), tag) != tags.end();
    tag->hold = stays ? &claim_ : nullptr;
  }
  tags_.swap(kept);
  Registry::instance().changed.notify_all();
}

void share_with_active_devices() {
  static std::atomic<uint64_t> known{0};  // the active devices, all of which can access all memory
  const uint64_t active = Device::active();
  uint64_t before = known.load();
  if (active == before) return;
  if ((active & ~before) != 0) {
    Registry& registry = Registry::instance();
    std::unique_lock<std::mutex> lock(registry.mutex);
    const std::vector<Tag*> tags = registry.select({});
    lock.unlock();
    bool all = true;
    for (Tag* tag : tags) all &= share_memory_of(*tag);
    // If the active devices have changed during the call, some may lack access to new memory.
    if (!all || Device::active() != active) return;
  }
  known.compare_exchange_strong(before, active);
}

uint64_t allocate(Tag& tag, Device& device, uint64_t bytes) {
  Registry& registry = Registry::instance();
  check_options();
  const bool shareable = tag.shareable.load();
  const std::string what = "an allocation in tag " + quoted(tag.name);
  if (bytes > device.total_bytes()) throw registry.shortage(what, device, bytes).with_tag(tag.name);
  retry_releases(Retry::kWithoutWaiting);  // may free the addresses of this allocation
  share_with_active_devices();
  VaReservation span;  // outlives the Hold: an unused span is freed without the lock
  Hold hold(std::unique_lock<std::mutex>(registry.mutex), {&tag});
  if (tag.state != State::kMapped) {
    throw Error(Status::kInvalidState,
                "tag " + quoted(tag.name) +
                    " is paused, so nothing can be allocated in it: resume it first, or "
                    "allocate under memsaver.disabled()")
        .with_tag(tag.name);
  }
  Pool& pool = registry.pool(tag, device);
  const ExtentSizes sizes = extent_sizes(pool.heap, shareable);
  Heap::Placement plan = pool.heap.plan_block(bytes, sizes.large_bytes, sizes.slab_bytes);
  hold.unlock();

  if (plan.block.bytes == 0) {
    const uint64_t span_bytes = (bytes + kSlotBytes - 1) / kSlotBytes * kSlotBytes;
    span = VaReservation::reserve(span_bytes, kSlotBytes);
    hold.lock();
    registry.publish(span, pool);
    try {
      pool.heap.commit_span(std::move(span));
    } catch (...) {
      registry.retract(span);
      throw;
    }
    plan = pool.heap.plan_block(bytes, sizes.large_bytes, sizes.slab_bytes);
    hold.unlock();
  }

  std::map<uint64_t, Mapping> mapped;
  try {
    mapped = map_new(device, plan.missing, shareable);
  } catch (const Error& error) {
    if (error.status != Status::kOutOfDeviceMemory) throw;
    if (plan.is_large) {  // a partly mapped place needs less memory
      hold.lock();
      plan = pool.heap.plan_block(bytes, UINT64_MAX, 0);
      hold.unlock();
    }
    try {
      mapped = map_new(device, plan.least, shareable);
    } catch (const Error& again) {
      if (!again.no_physical_memory) throw;
      const uint64_t margin = option(Option::margin_bytes);
      const std::string beyond =
          margin == 0 ? "" : ", with " + format_bytes(margin) + " to stay free (margin_bytes),";
      throw registry.shortage(what + beyond, device, total(plan.least)).with_tag(tag.name);
    }
  }
  hold.lock();
  cut_out(pool.retained, plan.block);  // the bytes saved there belong to an earlier block
  pool.heap.commit_block(plan, mapped);
  timeline::note(Record::Kind::kAllocate, pool);
  ++registry.changes;
  return plan.block.address;
}

void deallocate(uint64_t address) {
  Registry& registry = Registry::instance();
  Pool* const pool = Registry::owner(address);
  if (!pool) throw Error(Status::kNotOurs, "the address was not allocated by memsaver");
  std::unique_lock<std::mutex> lock(registry.mutex);
  const Heap::Block* const block = pool->heap.find(address);
  if (!block || block->is_freed) {
    throw Error(Status::kInvalidArgument,
                "the address is not the start of a live allocation of tag " +
                    quoted(pool->tag.name) + ": freed twice, or an interior pointer")
        .with_tag(pool->tag.name);
  }
  pool->heap.free_later(address);
  ++registry.changes;
  const State state = pool->tag.state;
  // The owner of the Hold completes the free.
  if (state == State::kSaving || state == State::kRestoring) return;
  try {
    Hold hold(std::move(lock), {&pool->tag});
  } catch (const std::bad_alloc&) {
    // The block is pending free, and the next Hold releases its memory.
  } catch (const Error&) {
    // The wait would deadlock: the current Hold releases the block's memory.
  }
}

}  // namespace memsaver
