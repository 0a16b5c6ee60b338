#include "calls.h"

namespace memsaver::sim {

Call::Call(const char* name, Needs needs) : name_(name) { status_ = check(needs); }

CUresult Call::check(Needs needs) {
  if (in_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  State& shared = state();
  lock_ = Lock(shared.mutex);
  const CUresult fault = shared.faults.count(name_);
  if (fault != CUDA_SUCCESS) return fault;
  if (shared.deinitialized) return CUDA_ERROR_DEINITIALIZED;
  if (needs == Needs::kNothing) return CUDA_SUCCESS;
  if (!shared.initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (Streams::in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
  if (needs == Needs::kInit) return CUDA_SUCCESS;
  context_ = current_context();
  if (context_ == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (context_->retained == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return context_->broken;
}

}  // namespace memsaver::sim
