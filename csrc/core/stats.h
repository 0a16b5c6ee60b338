// stats: what every tag holds on every device, and all backups of host memory, now.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
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
  double since_seconds;                       // when it came into its state, since 1970
  std::shared_ptr<const std::string> caller;  // who brought it there, by its own words, or null
};

// One moment's figures for all tags, in the order of their making. Takes the registry's lock.
std::vector<Usage> usage();

// The devices that tags have memory of, by ordinal. Takes the registry's lock.
std::vector<const Device*> devices_of_tags();

// Host memory for all backups.
struct HostUsage {
  uint64_t held_bytes;       // by them, and by what they need meanwhile
  uint64_t available_bytes;  // that they may take beyond that: by option host_bytes, by the system
};

// Reads files of the system. Throws kBadConfig for an option that cannot be understood.
HostUsage host_usage();

}  // namespace memsaver
