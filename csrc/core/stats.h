// stats: what every tag holds on every device, now.
#pragma once

#include <cstdint>
#include <vector>

#include "core/registry.h"

namespace memsaver {

struct Usage {
  const Tag* tag;
  int device;  // -1: the tag has no memory anywhere
  State state;
  Backup policy;
  uint64_t allocations, allocated_bytes, resident_bytes, backup_bytes, host_bytes, disk_bytes;
  uint64_t pauses, resumes, failures;
  double last_pause_seconds, last_resume_seconds, pause_seconds, resume_seconds;
  Tally paused, resumed;
  Unchanged last_unchanged, unchanged;
};

// One moment's figures for all tags, in the order of their making. Takes the registry's lock.
std::vector<Usage> usage();

}  // namespace memsaver
