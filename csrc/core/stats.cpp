#include "core/stats.h"

namespace memsaver {

std::vector<Usage> usage() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<Usage> rows;
  for (const auto& tag : registry.tags()) {
    Usage row{tag.get(),
              -1,
              tag->state,
              tag->policy,
              0,
              0,
              0,
              0,
              0,
              0,
              tag->pauses,
              tag->resumes,
              tag->last_pause_seconds,
              tag->last_resume_seconds};
    if (tag->pools.empty()) rows.push_back(row);
    for (const auto& [ordinal, pool] : tag->pools) {
      row.device = ordinal;
      row.allocations = pool.heap.allocations();
      row.allocated_bytes = pool.heap.allocated_bytes();
      row.resident_bytes = pool.heap.resident_bytes();
      for (const auto& [address, memory] : pool.parked) row.resident_bytes += memory.bytes();
      row.backup_bytes = total(intersect(pool.saved, pool.heap.live()));
      row.host_bytes = pool.backup ? pool.backup->host_bytes() : 0;
      row.disk_bytes = pool.backup ? pool.backup->disk_bytes() : 0;
      rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace memsaver
