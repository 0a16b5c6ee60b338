// stats: the current memory of every tag on every device, and of all host backups.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/memory/registry.h"
#include "memsaver_inspection.h"

namespace memsaver {

// The statistics of one tag on one device, with the tag's last-transition record.
struct Usage : ms_usage {
  double since_seconds;                       // when the state began, in seconds since 1970
  std::shared_ptr<const std::string> caller;  // the caller of that transition, or null
};

// Returns the statistics of all tags at one moment, with the oldest tag first. Acquires the
// registry's lock.
std::vector<Usage> usage();

// Returns the devices on which tags have memory, in order of their ordinals. Acquires the
// registry's lock.
std::vector<const Device*> devices_of_tags();

// Host memory of all backups.
struct HostUsage {
  uint64_t held_bytes;  // in use for backups and for their temporary buffers
  // The bytes that backups may still allocate, as limited by option host_bytes and the system's
  // memory.
  uint64_t available_bytes;
};

// Returns the host memory of all backups. Reads system files. Throws kBadConfig if an option is
// invalid.
HostUsage host_usage();

}  // namespace memsaver
