// Primary contexts, one per device, and each thread's stack of current ones.
//
// Needs the lock of state.h, except for the calls on the thread's own stack.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "streams.h"

namespace memsaver::sim {

// Lives as long as the process; its address is the CUcontext. Empty while nobody retains it.
struct Context {
  explicit Context(int ordinal) : device(ordinal) {}

  const int device;
  unsigned retained = 0;
  StreamPtr legacy;
  std::map<uint64_t, StreamPtr> per_thread;  // by a number of the thread
  CUresult broken = CUDA_SUCCESS;            // what every call returns after an illegal access

  CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
  StreamPtr stream_of_this_thread();
};

// Null when the handle is not a retained context's.
Context* find_context(CUcontext handle);

void retain(Context* context);
// The last release waits for the context's work (giving up the lock) and then frees its streams,
// events, modules, cuMemAlloc blocks and host memory. Memory of the virtual-memory calls stays.
CUresult release(Lock* lock, Context* context);

// The calling thread's stack.
Context* current_context();           // null when there is none
void set_current(Context* context);   // replaces the top; null pops it
bool push_current(Context* context);  // false when the stack is full
bool pop_current(Context** context);  // false when it is empty

}  // namespace memsaver::sim
