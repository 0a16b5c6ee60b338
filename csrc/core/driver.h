// driver: the table of the CUDA driver's entry points, filled once. Nothing else opens libcuda.
//
// MEMSAVER_DRIVER names another library: "sim" is the simulated driver beside libmemsaver.so,
// anything else a path. The names are cuda.h's, whose macros choose the versioned symbols
// (cuMemAlloc is cuMemAlloc_v2), so that a library built with CUDA 12 or 13 headers asks for the
// same symbols.
#pragma once

#include <cuda.h>

#include <string>

#include "core/status.h"

namespace memsaver {

#define MS_DRIVER_CALLS(X)         \
  X(cuInit)                        \
  X(cuDriverGetVersion)            \
  X(cuGetErrorName)                \
  X(cuGetErrorString)              \
  X(cuDeviceGetCount)              \
  X(cuDeviceGet)                   \
  X(cuDeviceGetAttribute)          \
  X(cuDeviceGetPCIBusId)           \
  X(cuDeviceCanAccessPeer)         \
  X(cuDevicePrimaryCtxRetain)      \
  X(cuDevicePrimaryCtxRelease)     \
  X(cuDevicePrimaryCtxGetState)    \
  X(cuCtxGetCurrent)               \
  X(cuCtxPushCurrent)              \
  X(cuCtxPopCurrent)               \
  X(cuCtxGetDevice)                \
  X(cuMemGetInfo)                  \
  X(cuMemGetAllocationGranularity) \
  X(cuMemAddressReserve)           \
  X(cuMemAddressFree)              \
  X(cuMemCreate)                   \
  X(cuMemRelease)                  \
  X(cuMemMap)                      \
  X(cuMemUnmap)                    \
  X(cuMemSetAccess)                \
  X(cuMemAlloc)                    \
  X(cuMemFree)                     \
  X(cuMemHostRegister)             \
  X(cuMemHostUnregister)           \
  X(cuMemHostGetDevicePointer)     \
  X(cuPointerGetAttribute)         \
  X(cuMemcpyDtoHAsync)             \
  X(cuMemcpyHtoDAsync)             \
  X(cuMemsetD8Async)               \
  X(cuStreamCreate)                \
  X(cuStreamDestroy)               \
  X(cuStreamSynchronize)           \
  X(cuStreamWaitEvent)             \
  X(cuEventCreate)                 \
  X(cuEventRecord)                 \
  X(cuEventSynchronize)            \
  X(cuEventDestroy)                \
  X(cuModuleLoadData)              \
  X(cuModuleGetFunction)           \
  X(cuModuleUnload)                \
  X(cuLaunchKernel)                \
  X(cuThreadExchangeStreamCaptureMode)

struct DriverTable {
#define MS_DRIVER_MEMBER(name) decltype(&::name) name;
  MS_DRIVER_CALLS(MS_DRIVER_MEMBER)
#undef MS_DRIVER_MEMBER
  std::string opened;  // what answers: "libcuda.so.1", or what MEMSAVER_DRIVER named
  bool simulated;
  int version;  // 13000 for 13.0
};

// The table, opened and initialised (cuInit) at the first use; starts no context. Throws kNotLoaded
// when there is no usable driver, at every call until there is one. Any thread.
const DriverTable& driver();

// The same where it is open already, else null. Any thread.
const DriverTable* open_driver_table() noexcept;

// Throws what a driver call's result says: kOutOfDeviceMemory for CUDA_ERROR_OUT_OF_MEMORY, else
// kDriverFailed; nothing for CUDA_SUCCESS. `call` needs static storage.
void check(CUresult result, const char* call);

// "cuMemMap failed with CUDA_ERROR_INVALID_VALUE (1): invalid argument". Never throws.
std::string describe(CUresult result, const char* call) noexcept;

// True when the driver is going or gone because the process exits: nothing is left to undo then.
bool is_shutdown(CUresult result) noexcept;

// CU_CHECK(cuMemMap, address, bytes, 0, handle, 0) makes the call and throws if it failed.
#define CU_CHECK(name, ...) ::memsaver::check(::memsaver::driver().name(__VA_ARGS__), #name)

}  // namespace memsaver
