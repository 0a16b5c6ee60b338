// driver: the table of the CUDA driver's entry points, filled once. No other code opens libcuda.
//
// The environment variable MEMSAVER_DRIVER names another library: "sim" means the simulated driver
// beside libmemsaver.so; any other value is a path. The names in the table are those of cuda.h,
// whose macros select the versioned symbols (cuMemAlloc is cuMemAlloc_v2). Libraries built with the
// headers of CUDA 12 and CUDA 13 therefore use the same symbols.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "core/platform/status.h"

namespace memsaver {

#define MS_DRIVER_CALLS(X)          \
  X(cuInit)                         \
  X(cuDriverGetVersion)             \
  X(cuGetErrorName)                 \
  X(cuGetErrorString)               \
  X(cuDeviceGetCount)               \
  X(cuDeviceGet)                    \
  X(cuDeviceGetAttribute)           \
  X(cuDeviceGetPCIBusId)            \
  X(cuDeviceCanAccessPeer)          \
  X(cuDevicePrimaryCtxRetain)       \
  X(cuDevicePrimaryCtxRelease)      \
  X(cuDevicePrimaryCtxGetState)     \
  X(cuCtxGetCurrent)                \
  X(cuCtxPushCurrent)               \
  X(cuCtxPopCurrent)                \
  X(cuCtxGetDevice)                 \
  X(cuMemGetInfo)                   \
  X(cuMemGetAllocationGranularity)  \
  X(cuMemAddressReserve)            \
  X(cuMemAddressFree)               \
  X(cuMemCreate)                    \
  X(cuMemRelease)                   \
  X(cuMemExportToShareableHandle)   \
  X(cuMemImportFromShareableHandle) \
  X(cuMemMap)                       \
  X(cuMemUnmap)                     \
  X(cuMemSetAccess)                 \
  X(cuMemAlloc)                     \
  X(cuMemFree)                      \
  X(cuMemHostRegister)              \
  X(cuMemHostUnregister)            \
  X(cuMemHostGetDevicePointer)      \
  X(cuPointerGetAttribute)          \
  X(cuMemcpyDtoHAsync)              \
  X(cuMemcpyHtoDAsync)              \
  X(cuMemcpyDtoDAsync)              \
  X(cuMemsetD8Async)                \
  X(cuStreamCreate)                 \
  X(cuStreamDestroy)                \
  X(cuStreamSynchronize)            \
  X(cuStreamWaitEvent)              \
  X(cuEventCreate)                  \
  X(cuEventRecord)                  \
  X(cuEventSynchronize)             \
  X(cuEventDestroy)                 \
  X(cuModuleLoadData)               \
  X(cuModuleGetFunction)            \
  X(cuModuleUnload)                 \
  X(cuLaunchKernel)                 \
  X(cuThreadExchangeStreamCaptureMode)

struct DriverTable {
#define MS_DRIVER_MEMBER(name) decltype(&::name) name;
  MS_DRIVER_CALLS(MS_DRIVER_MEMBER)
#undef MS_DRIVER_MEMBER
  std::string opened;  // the opened library: "libcuda.so.1", or the value of MEMSAVER_DRIVER
  bool simulated;
  // The simulated driver's sim_explain_host_faults (csrc/sim/sim.h); null for any other driver.
  void (*explain_host_faults)(const char* (*paused_tag)(uint64_t address));
  int version;  // 13000 for 13.0
};

// Returns the table. The first call opens and initializes the driver (cuInit). Creates no context.
// Any thread. Throws kNotLoaded on every call until a usable driver is found.
const DriverTable& driver();

// Returns the table if it is open, otherwise null. Any thread.
const DriverTable* open_driver_table() noexcept;

// Throws the error of a failed driver call: kOutOfDeviceMemory for CUDA_ERROR_OUT_OF_MEMORY,
// otherwise kDriverFailed. Does nothing for CUDA_SUCCESS. `call` must have static storage.
void check(CUresult result, const char* call);

// Returns a description, such as "cuMemMap failed with CUDA_ERROR_INVALID_VALUE (1): invalid
// argument". Never throws.
std::string describe(CUresult result, const char* call) noexcept;

// Returns whether the result means that the driver is shutting down because the process exits. In
// that case, nothing needs to be undone.
bool is_shutdown(CUresult result) noexcept;

// CU_CHECK(cuMemMap, address, bytes, 0, handle, 0) makes the call and throws if it failed.
#define CU_CHECK(name, ...) ::memsaver::check(::memsaver::driver().name(__VA_ARGS__), #name)

}  // namespace memsaver
