// Entry points: initialization, devices, contexts.
#include <cuda.h>

#include <cstdio>
#include <cstring>

#include "calls.h"

using namespace memsaver::sim;

namespace {

constexpr int kDriverVersion = 13000;

struct Attribute {
  int name;  // CUdevice_attribute; a number if CUDA 12.0's header lacks the name
  int value;
};

constexpr Attribute kAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
    {134, 0},  // CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuInit(unsigned int flags) {
  if (!in_forked_child()) {
    Lock lock(state().mutex);
    const CUresult result = read_environment();
    if (result != CUDA_SUCCESS) return result;
  }
  Call call("cuInit", Needs::kNothing);
  if (call.refused()) return call.status();
  return flags == 0 ? initialize() : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDriverGetVersion(int* version) {
  Call call("cuDriverGetVersion", Needs::kNothing);
  if (call.refused()) return call.status();
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount", Needs::kInit);
  if (call.refused()) return call.status();
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<int>(state().devices.size());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  Call call("cuDeviceGet", Needs::kInit);
  if (call.refused()) return call.status();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (state().device(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  Call call("cuDeviceGetName", Needs::kInit);
  if (call.refused()) return call.status();
  if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (state().device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(length), "memsaver simulated device");
  return CUDA_SUCCESS;
}

// Named with the suffix _v2, because CUDA 12 declares this function in addition to an older
// cuDeviceGetUuid, and CUDA 13 declares it instead of the older one.
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  Call call("cuDeviceGetUuid", Needs::kInit);
  if (call.refused()) return call.status();
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (state().device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::memcpy(uuid->bytes, "memsaver-sim-000", sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  Call call("cuDeviceGetPCIBusId", Needs::kInit);
  if (call.refused()) return call.status();
  constexpr int kLength = 13;  // domain:bus:device.function and a zero
  if (text == nullptr || length < kLength) return CUDA_ERROR_INVALID_VALUE;
  if (state().device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  Call call("cuDeviceTotalMem", Needs::kInit);
  if (call.refused()) return call.status();
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Device* found = state().device(device);
  if (found == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = found->memory.capacity_bytes();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  Call call("cuDeviceGetAttribute", Needs::kInit);
  if (call.refused()) return call.status();
  if (value == nullptr || attribute <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (state().device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *value = 0;
  if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *value = device + 1;
  for (const Attribute& known : kAttributes) {
    if (known.name == attribute) *value = known.value;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can_access, CUdevice device, CUdevice peer) {
  Call call("cuDeviceCanAccessPeer", Needs::kInit);
  if (call.refused()) return call.status();
  if (can_access == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (state().device(device) == nullptr || state().device(peer) == nullptr) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *can_access = device != peer && state().peer_access ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Call call("cuDevicePrimaryCtxRetain", Needs::kInit);
  if (call.refused()) return call.status();
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Device* found = state().device(device);
  if (found == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  retain(&found->context);
  *context = found->context.handle();
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  Call call("cuDevicePrimaryCtxRelease", Needs::kInit);
  if (call.refused()) return call.status();
  Device* found = state().device(device);
  if (found == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return release(call.lock(), &found->context);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  Call call("cuDevicePrimaryCtxGetState", Needs::kInit);
  if (call.refused()) return call.status();
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Device* found = state().device(device);
  if (found == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = found->context.retained > 0 ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  Call call("cuCtxGetCurrent", Needs::kInit);
  if (call.refused()) return call.status();
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* current = current_context();
  *context = current == nullptr ? nullptr : current->handle();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  Call call("cuCtxSetCurrent", Needs::kInit);
  if (call.refused()) return call.status();
  Context* found = find_context(context);
  if (context != nullptr && found == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  set_current(found);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  Call call("cuCtxPushCurrent", Needs::kInit);
  if (call.refused()) return call.status();
  Context* found = find_context(context);
  if (found == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return push_current(found) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  Call call("cuCtxPopCurrent", Needs::kInit);
  if (call.refused()) return call.status();
  Context* popped = nullptr;
  if (!pop_current(&popped)) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = popped->handle();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  Call call("cuCtxGetDevice", Needs::kInit);
  if (call.refused()) return call.status();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Context* current = current_context();
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
  Call call("cuCtxSynchronize", Needs::kContext);
  if (call.refused()) return call.status();
  const CUresult admitted = state().captures.admit_context_wait(call.context());
  if (admitted != CUDA_SUCCESS) return admitted;
  Streams& streams = state().streams;
  streams.wait(call.lock(), streams.pending(call.context()));
  return call.context()->broken;
}

}  // extern "C"
#pragma GCC visibility pop
