// Primary contexts, one per device, and each thread's stack of current contexts.
//
// The caller of a function must own State::mutex (state.h), unless the function uses only the
// calling thread's stack.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "streams.h"

namespace memsaver::sim {

// A primary context. The address of this object is the CUcontext. The context is never destroyed,
// and owns no objects while it is not retained.
struct Context {
  explicit Context(int ordinal) : device(ordinal) {}

  const int device;
  unsigned retained = 0;
  StreamPtr legacy;
  std::map<uint64_t, StreamPtr> per_thread;  // by thread number
  CUresult broken = CUDA_SUCCESS;            // the result of every call after an illegal access

  CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
  StreamPtr stream_of_this_thread();
};

// Returns the context of a handle, or null if the handle does not refer to a retained context.
Context* find_context(CUcontext handle);

void retain(Context* context);
// Releases a reference. The last release waits for the context's work (with the lock released),
// then frees its streams, events, modules, cuMemAlloc blocks and host memory. Memory from the
// virtual-memory calls is not freed.
CUresult release(Lock* lock, Context* context);

// The calling thread's stack.
Context* current_context();           // null if there is none
void set_current(Context* context);   // replaces the top; null pops it
bool push_current(Context* context);  // false if the stack is full
bool pop_current(Context** context);  // false if the stack is empty

}  // namespace memsaver::sim
