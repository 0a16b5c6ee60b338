// The simulated device has only one kernel, memsaver's own, which runs on the CPU. Only the first
// bytes of an image are examined.
#pragma once

#include <cuda.h>

#include "streams.h"

namespace memsaver::sim {

struct Module {
  Context* context = nullptr;
  CUfunction kernel = nullptr;  // ms_fingerprint; null before the kernel is looked up
};

// Returns whether the bytes begin like a fatbin, an ELF object or PTX.
bool is_image(const void* image);
bool is_kernel(const char* name);

// Sets the operands of a launch. `arguments` are the arguments of cuLaunchKernel. Returns false for
// a launch geometry that the kernel does not support.
bool prepare_launch(unsigned blocks, unsigned threads, void* const* arguments, Operation* launch);

// Records the ranges that the launch would read if it ran now. The caller must own
// State::mutex (state.h).
void note_reads(Operation* launch, int device);

// Runs the launch with the lock released. Returns false and sets *culprit if the device cannot
// access a range because the range is unmapped, has no access rights, or is unpinned host memory.
bool run_launch(Lock* lock, const Operation& launch, int device, Range* culprit);

}  // namespace memsaver::sim
