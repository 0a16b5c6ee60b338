// stats: what every tag holds on every device, and all backups of host memory, now.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/registry.h"
#include "memsaver.h"

namespace memsaver {

// One tag on one device: the row that the ABI returns, and the tag's last-transition record.
struct Usage : ms_usage {
  double since_seconds;                       // seconds since 1970 at which the state began
  std::shared_ptr<const std::string> caller;  // the caller of that transition, or null
};

// Returns the figures of all tags at one moment, oldest tag first. Takes the registry's lock.
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
