#include "core/stats.h"

namespace memsaver {

std::vector<Usage> usage() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<Usage> rows;
  for (const auto& tag : registry.tags()) {
    Usage row{};
    row.tag = tag.get();
    row.device = -1;
    row.state = tag->state;
    row.policy = tag->policy;
    row.pauses = tag->pauses;
    row.resumes = tag->resumes;
    row.failures = tag->failures;
    row.last_pause_seconds = tag->last_pause_seconds;
    row.last_resume_seconds = tag->last_resume_seconds;
    row.pause_seconds = tag->pause_seconds;
    row.resume_seconds = tag->resume_seconds;
    if (tag->pools.empty()) rows.push_back(row);
    for (const auto& [ordinal, pool] : tag->pools) {
      row.device = ordinal;
      row.allocations = pool.heap.allocations();
      row.allocated_bytes = pool.heap.allocated_bytes();
      row.resident_bytes = pool.resident_bytes();
      row.backup_bytes = total(intersect(pool.saved, pool.heap.live()));
      row.host_bytes = pool.backup ? pool.backup->host_bytes() : 0;
      row.disk_bytes = pool.backup ? pool.backup->disk_bytes() : 0;
      row.paused = pool.paused;
      row.resumed = pool.resumed;
      row.last_unchanged = pool.last_unchanged;
      row.unchanged = pool.unchanged;
      rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace memsaver
