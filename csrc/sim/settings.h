// The environment variables that sim.h documents.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "faults.h"

namespace memsaver::sim {

struct Settings {
  int devices = 1;
  uint64_t memory_bytes = 80ull << 30;  // per device, a multiple of kGranularity
  std::vector<Fault> faults;
};

// Reads the variables into *settings. Returns "" if all variables are valid. Otherwise, returns a
// description of the problem with the first invalid variable, and *settings is unspecified.
std::string read_settings(Settings* settings);

}  // namespace memsaver::sim
