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

// Describes the problem with the first invalid variable; *settings is then unspecified. Returns ""
// if all are valid.
std::string read_settings(Settings* settings);

}  // namespace memsaver::sim
