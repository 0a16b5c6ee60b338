// Entry points: plain device memory, host memory, pointer attributes.
#include <cuda.h>

#include <cstring>

#include "calls.h"

using namespace memsaver::sim;

namespace {

template <typename T>
CUresult put(void* data, T value) {
  std::memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

// The properties of a device or host address.
struct Known {
  CUmemorytype type;
  int device;
  CUcontext context;  // null for memory from the virtual-memory calls, which has no context
  Range range;        // for a mapping: its reservation
  unsigned long long id;
};

bool look_up(uint64_t address, Known* known) {
  State& shared = state();
  if (const Mapping* mapping = shared.space.find(address)) {
    const int device = mapping->memory->ordinal();
    const bool block = mapping->from_alloc;
    *known = {CU_MEMORYTYPE_DEVICE, device,
              block ? shared.device(device)->context.handle() : nullptr,
              block ? mapping->range : shared.space.reservation(address), mapping->id};
    return true;
  }
  if (const HostMemory::Entry* entry = shared.host.find(address)) {
    *known = {CU_MEMORYTYPE_HOST, entry->device, shared.device(entry->device)->context.handle(),
              entry->range, entry->range.address};
    return true;
  }
  return false;
}

// Waits for all work submitted earlier to the device, on every stream, as frees of plain or host
// memory do even during captures. Releases the lock while waiting.
CUresult wait_for_device(Call* call, int device) {
  const Context& context = state().device(device)->context;
  state().streams.wait(call->lock(), state().streams.pending(&context));
  return context.broken;
}

// Implements cuMemFreeHost (`registered` false) and cuMemHostUnregister (true).
CUresult free_pinned(Call* call, void* pointer, bool registered) {
  const CUresult admitted = state().captures.admit_unsafe_call();
  if (admitted != CUDA_SUCCESS) return admitted;
  HostMemory& host = state().host;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (!registered && address == 0) return CUDA_SUCCESS;
  const HostMemory::Entry* entry = host.find(address);
  if (entry == nullptr) {
    return registered ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_ERROR_INVALID_VALUE;
  }
  if (entry->registered != registered || entry->range.address != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Range range = entry->range;
  const CUresult waited = wait_for_device(call, entry->device);
  if (waited != CUDA_SUCCESS) return waited;
  const CUresult result = registered ? host.remove(address) : host.free(address);
  if (result == CUDA_SUCCESS) state().streams.report_use(call->name(), range);
  return result;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Call call("cuMemGetInfo", Needs::kContext);
  if (call.refused()) return call.status();
  if (free_bytes == nullptr || total_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *free_bytes = call.device()->memory.free_bytes();
  *total_bytes = call.device()->memory.capacity_bytes();
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  Call call("cuMemAlloc", Needs::kContext);
  if (call.refused()) return call.status();
  const CUresult admitted = state().captures.admit_unsafe_call();
  if (admitted != CUDA_SUCCESS) return admitted;
  if (address == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
  State& shared = state();
  uint64_t got = 0;
  const CUresult result =
      shared.space.allocate(&call.device()->memory, size, shared.next_handle(), &got);
  if (result == CUDA_SUCCESS) *address = got;
  return result;
}

CUresult cuMemFree(CUdeviceptr address) {
  Call call("cuMemFree", Needs::kContext);
  if (call.refused()) return call.status();
  const CUresult admitted = state().captures.admit_unsafe_call();
  if (admitted != CUDA_SUCCESS) return admitted;
  if (address == 0) return CUDA_SUCCESS;
  const Mapping* mapping = state().space.find(address);
  if (mapping == nullptr || !mapping->from_alloc || mapping->range.address != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Range range = mapping->range;
  const CUresult waited = wait_for_device(&call, mapping->memory->ordinal());
  if (waited != CUDA_SUCCESS) return waited;
  const CUresult result = state().space.free_block(address);
  if (result == CUDA_SUCCESS) state().streams.report_use(call.name(), range);
  return result;
}

CUresult cuMemHostAlloc(void** address, size_t size, unsigned int flags) {
  Call call("cuMemHostAlloc", Needs::kContext);
  if (call.refused()) return call.status();
  const CUresult admitted = state().captures.admit_unsafe_call();
  if (admitted != CUDA_SUCCESS) return admitted;
  constexpr unsigned kKnownFlags =
      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (address == nullptr || (flags & ~kKnownFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  *address = nullptr;
  if (size == 0) return CUDA_SUCCESS;
  uint64_t got = 0;
  const CUresult result = state().host.allocate(size, call.context()->device, &got);
  if (result == CUDA_SUCCESS) *address = reinterpret_cast<void*>(got);
  return result;
}

CUresult cuMemFreeHost(void* address) {
  Call call("cuMemFreeHost", Needs::kContext);
  if (call.refused()) return call.status();
  return free_pinned(&call, address, false);
}

CUresult cuMemHostRegister(void* address, size_t size, unsigned int flags) {
  Call call("cuMemHostRegister", Needs::kContext);
  if (call.refused()) return call.status();
  const CUresult admitted = state().captures.admit_unsafe_call();
  if (admitted != CUDA_SUCCESS) return admitted;
  constexpr unsigned kKnownFlags =
      CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
  const Range range{reinterpret_cast<uint64_t>(address), size};
  if ((flags & ~kKnownFlags) != 0 || state().space.owns(range.address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return state().host.add(range, call.context()->device);
}

CUresult cuMemHostUnregister(void* address) {
  Call call("cuMemHostUnregister", Needs::kContext);
  if (call.refused()) return call.status();
  return free_pinned(&call, address, true);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* device_address, void* address, unsigned int flags) {
  Call call("cuMemHostGetDevicePointer", Needs::kContext);
  if (call.refused()) return call.status();
  const uint64_t at = reinterpret_cast<uint64_t>(address);
  if (device_address == nullptr || flags != 0 || state().host.find(at) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *device_address = at;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  Call call("cuPointerGetAttribute", Needs::kInit);
  if (call.refused()) return call.status();
  Known known;
  if (data == nullptr || !look_up(address, &known)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, known.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(data, static_cast<unsigned>(known.type));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put(data, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (known.type != CU_MEMORYTYPE_HOST) return CUDA_ERROR_INVALID_VALUE;
      return put(data, reinterpret_cast<void*>(address));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put(data, known.id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put(data, 0u);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, known.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return put(data, known.type == CU_MEMORYTYPE_DEVICE && known.context != nullptr ? 1u : 0u);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put(data, known.range.address);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put(data, static_cast<size_t>(known.range.size));
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put(data, 1u);  // independent of access rights
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // extern "C"
#pragma GCC visibility pop
