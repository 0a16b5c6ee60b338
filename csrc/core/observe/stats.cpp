#include "core/observe/stats.h"

#include <algorithm>
#include <map>

#include "core/memory/backups.h"
#include "core/platform/host_budget.h"
#include "core/platform/options.h"

namespace memsaver {

std::vector<Usage> usage() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<Usage> rows;
  for (const auto& tag : registry.tags()) {
    Usage row{};
    row.tag = tag->name.c_str();
    row.device = -1;
    row.state = static_cast<int32_t>(tag->state);
    row.backup = static_cast<int32_t>(tag->policy);
    row.pauses = tag->pauses;
    row.resumes = tag->resumes;
    row.failures = tag->failures;
    row.last_pause_seconds = tag->last_pause_seconds;
    row.last_resume_seconds = tag->last_resume_seconds;
    row.pause_seconds = tag->pause_seconds;
    row.resume_seconds = tag->resume_seconds;
    const bool settled = tag->state == State::kMapped || tag->state == State::kPaused;
    const TransitionRecord& transition = settled ? tag->last_transition : tag->current_transition;
    row.since_seconds = transition.at_seconds;
    row.caller = transition.caller;
    if (tag->pools.empty()) rows.push_back(row);
    for (const auto& [ordinal, pool] : tag->pools) {
      row.device = ordinal;
      row.allocations = pool.heap.allocations();
      row.allocated_bytes = pool.heap.allocated_bytes();
      row.resident_bytes = pool.resident_bytes();
      row.backup_bytes = total(intersect(pool.saved, pool.heap.live()));
      row.host_bytes = pool.backup ? pool.backup->host_bytes() : 0;
      row.disk_bytes = pool.backup ? pool.backup->disk_bytes() : 0;
      row.peer_bytes = pool.backup ? pool.backup->peer_bytes() : 0;
      row.last_paused_bytes = pool.paused.last_device_bytes;
      row.last_saved_bytes = pool.paused.last_copied_bytes;
      row.last_resumed_bytes = pool.resumed.last_device_bytes;
      row.last_restored_bytes = pool.resumed.last_copied_bytes;
      row.paused_bytes = pool.paused.device_bytes;
      row.saved_bytes = pool.paused.copied_bytes;
      row.resumed_bytes = pool.resumed.device_bytes;
      row.restored_bytes = pool.resumed.copied_bytes;
      row.last_unchanged_pieces = pool.last_unchanged.pieces;
      row.last_unchanged_bytes = pool.last_unchanged.bytes;
      row.unchanged_pieces = pool.unchanged.pieces;
      row.unchanged_bytes = pool.unchanged.bytes;
      rows.push_back(row);
    }
  }
  return rows;
}

std::vector<const Device*> devices_of_tags() {
  Registry& registry = Registry::instance();
  std::map<int, const Device*> by_ordinal;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    for (const auto& tag : registry.tags()) {
      for (const auto& [ordinal, pool] : tag->pools) by_ordinal[ordinal] = &pool.heap.device();
    }
  }
  std::vector<const Device*> devices;
  for (const auto& [ordinal, device] : by_ordinal) devices.push_back(device);
  return devices;
}

HostUsage host_usage() {
  const uint64_t claimed = HostClaim::claimed(), budget = option(Option::host_bytes);
  HostUsage found{held_host_bytes(), host_available_bytes()};
  if (budget != 0) {
    found.available_bytes = std::min(found.available_bytes, budget - std::min(budget, claimed));
  }
  return found;
}

}  // namespace memsaver
