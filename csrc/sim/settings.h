// The environment variables that sim.h documents.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "faults.h"

namespace memsaver::sim {

struct Settings {
  int devices = 1;
  uint64_t memory_bytes = 80ull << 30;  // of each device, a multiple of kGranularity
  std::vector<Fault> faults;
};

// What a variable must be whose value makes no sense; then *settings is unspecified. "": all do.
std::string read_settings(Settings* settings);

}  // namespace memsaver::sim
