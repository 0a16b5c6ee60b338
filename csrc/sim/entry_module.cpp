// Entry points: modules and launches.
#include <cuda.h>

#include "kernels.h"
#include "submission.h"

using namespace memsaver::sim;

#pragma GCC visibility push(default)
extern "C" {

CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  Call call("cuModuleLoadData", Needs::kContext);
  if (call.refused()) return call.status();
  if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_image(image)) return CUDA_ERROR_INVALID_IMAGE;
  *handle = reinterpret_cast<CUmodule>(state().next_handle());
  state().modules[*handle].context = call.context();
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* kernel, CUmodule handle, const char* name) {
  Call call("cuModuleGetFunction", Needs::kContext);
  if (call.refused()) return call.status();
  auto module = state().modules.find(handle);
  if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (module == state().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (!is_kernel(name)) return CUDA_ERROR_NOT_FOUND;
  CUfunction& known = module->second.kernel;
  if (known == nullptr) known = reinterpret_cast<CUfunction>(state().next_handle());
  *kernel = known;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule handle) {
  Call call("cuModuleUnload", Needs::kContext);
  if (call.refused()) return call.status();
  return state().modules.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int /*shared_bytes*/, CUstream handle,
                        void** arguments, void** extra) {
  Call call("cuLaunchKernel", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  bool known = false;
  for (const auto& [loaded, module] : state().modules) {
    known = known || (module.kernel == kernel && module.context == stream->context);
  }
  if (kernel == nullptr || !known) return CUDA_ERROR_INVALID_HANDLE;
  Operation launch;
  const bool flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
  if (grid_x == 0 || !flat || arguments == nullptr || extra != nullptr ||
      !prepare_launch(grid_x, block_x, arguments, &launch)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return submit(&call, stream, launch, Completion::kLater);
}

}  // extern "C"
#pragma GCC visibility pop
