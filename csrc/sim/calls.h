// The common beginning of every entry point.
#pragma once

#include <cuda.h>

#include "state.h"

namespace memsaver::sim {

enum class Needs {
  kNothing,  // works before cuInit
  kInit,
  kContext,  // a current context that is retained and intact
};

// Locks the state for the duration of a call, counts the call, applies faults, and checks the
// call's requirements:
//
//   Call call("cuMemGetInfo", Needs::kContext);
//   if (call.refused()) return call.status();
//
// In a forked child, the call acquires no lock and fails.
class Call {
 public:
  Call(const char* name, Needs needs);

  bool refused() const { return status_ != CUDA_SUCCESS; }
  CUresult status() const { return status_; }
  const char* name() const { return name_; }
  Lock* lock() { return &lock_; }
  // Returns the current context. Valid only for calls with Needs::kContext.
  Context* context() const { return context_; }
  Device* device() const { return state().devices[context_->device].get(); }

 private:
  CUresult check(Needs needs);

  const char* const name_;
  Lock lock_;
  Context* context_ = nullptr;
  CUresult status_ = CUDA_SUCCESS;
};

}  // namespace memsaver::sim
