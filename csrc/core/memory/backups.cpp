#include "core/memory/backups.h"

#include <optional>

#include "core/driver/deferred_release.h"
#include "core/memory/allocation.h"
#include "core/memory/registry.h"
#include "core/platform/host_budget.h"
#include "core/platform/status.h"
#include "core/platform/text.h"

namespace memsaver {

namespace {

void* view(const Range& range, State wanted, bool writable) {
  if (range.bytes == 0)
    throw Error(Status::kInvalidArgument,
                "an empty range has no backup to view: pass at least one byte");
  Registry& registry = Registry::instance();
  Pool* const pool = Registry::owner(range.address);
  if (!pool) throw Error(Status::kNotOurs, "memsaver did not allocate the tensor's memory");
  Hold hold(std::unique_lock<std::mutex>(registry.mutex), {&pool->tag});
  const std::string name = quoted(pool->tag.name);
  const auto refuse = [&](const std::string& why) {
    return Error(Status::kInvalidState, why).with_tag(pool->tag.name);
  };
  const bool is_paused = wanted == State::kPaused;
  if (pool->tag.state != wanted) {
    throw refuse("tag " + name + " is " + name_of(pool->tag.state) +
                 (is_paused ? ": its backup can be viewed only while it is paused"
                            : ": its retained copy can be viewed only while it is mapped"));
  }
  const std::optional<Range> block = pool->heap.block_around(range.address);
  if (!block || range.bytes > block->end() - range.address) {
    throw refuse("the tensor's memory is not inside one live allocation of tag " + name);
  }
  if (total(within(is_paused ? pool->saved : pool->retained, range)) != range.bytes) {
    if (!is_paused) throw refuse("tag " + name + " has no retained copy of the whole range");
    throw refuse("not all of the range was saved when tag " + name +
                 " was paused: it had no backup, or the memory belonged to no tensor");
  }
  void* const host = pool->backup->view(range.address);
  if (!host) {
    throw refuse(
        "the backup of tag " + name +
        " is not in host memory and cannot be viewed without a copy: resume the tag, or use "
        "backup='host' or 'pageable'");
  }
  if (writable) pool->backup->forget(range);
  return host;
}

}  // namespace

void* view_backup(const Range& range, bool writable) {
  return view(range, State::kPaused, writable);
}

void* view_retained(const Range& range, bool writable) {
  return view(range, State::kMapped, writable);
}

uint64_t trim_backups(const std::vector<std::string>& names) {
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  const std::vector<Tag*> tags = registry.select(names);
  lock.unlock();
  uint64_t released = 0;
  for (Tag* tag : tags) {
    lock.lock();
    if (would_wait({tag}, Need::kSettled) || would_wait_for_ever({tag}, Need::kMemory)) {
      lock.unlock();
      continue;
    }
    Hold hold(std::move(lock), {tag});
    for (auto& [ordinal, pool] : tag->pools) pool.retained.clear();
    hold.unlock();  // only the owner of the Hold uses the tag's memory
    for (auto& [ordinal, pool] : tag->pools) {
      if (!pool.backup) continue;
      DeviceScope scope(pool.heap.device());
      released += pool.backup->release(pool.saved);
      const BackupStore& store = *pool.backup;
      if (store.host_bytes() + store.disk_bytes() + store.peer_bytes() > 0) continue;
      std::unique_ptr<BackupStore> empty;
      hold.lock();
      pool.backup.swap(empty);
      hold.unlock();
    }
    lock = std::unique_lock<std::mutex>(registry.mutex, std::defer_lock);
  }
  return released + retry_releases(Retry::kAll).host_bytes;
}

uint64_t held_host_bytes() { return HostClaim::held(); }

}  // namespace memsaver
