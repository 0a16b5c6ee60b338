// The one kernel that the simulated device runs: memsaver's own, on the CPU. Of an image it looks
// at the first bytes alone.
#pragma once

#include <cuda.h>

#include "streams.h"

namespace memsaver::sim {

struct Module {
  Context* context = nullptr;
  CUfunction kernel = nullptr;  // ms_fingerprint; null until somebody asked for it
};

// Whether the bytes begin as a fatbin, an ELF object or PTX does.
bool is_image(const void* image);
bool is_kernel(const char* name);

// Fills in what a launch works on. `arguments` are those of cuLaunchKernel. False for a geometry
// that the kernel is not made for.
bool prepare_launch(unsigned blocks, unsigned threads, void* const* arguments, Operation* launch);

// Notes what the launch would read if it ran now. Needs the lock of state.h.
void note_reads(Operation* launch, int device);

// Runs it; gives up the lock meanwhile. False when it met memory that the device cannot reach
// (*culprit): unmapped, without access, or of the host and not pinned.
bool run_launch(Lock* lock, const Operation& launch, int device, Range* culprit);

}  // namespace memsaver::sim
