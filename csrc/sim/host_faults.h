// Explains why the process crashes when the host accesses device memory that is not mapped.
#pragma once

#include "sim.h"

namespace memsaver::sim {

// Like sim_explain_host_faults(), but without the check for a forked child.
void explain_host_faults(sim_paused_tag paused_tag) noexcept;

}  // namespace memsaver::sim
