// Entry points: reservations, handles, mappings, access.
#include <cuda.h>
#include <fcntl.h>

#include <cstdint>

#include "calls.h"

using namespace memsaver::sim;

namespace {

CUresult check_properties(const CUmemAllocationProp* properties) {
  if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return state().device(properties->location.id) == nullptr ? CUDA_ERROR_INVALID_DEVICE
                                                            : CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  Call call("cuMemGetAllocationGranularity", Needs::kInit);
  if (call.refused()) return call.status();
  if (granularity == nullptr || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                                 option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult checked = check_properties(properties);
  if (checked == CUDA_SUCCESS) *granularity = memsaver::sim::granularity();
  return checked;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  Call call("cuMemAddressReserve", Needs::kInit);
  if (call.refused()) return call.status();
  if (address == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t got = 0;
  const CUresult result = state().space.reserve(size, alignment, hint, &got);
  if (result == CUDA_SUCCESS) *address = got;
  return result;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  Call call("cuMemAddressFree", Needs::kInit);
  if (call.refused()) return call.status();
  return state().space.free({address, size});
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  Call call("cuMemCreate", Needs::kInit);
  if (call.refused()) return call.status();
  if (handle == nullptr || flags != 0 || size == 0 || size % granularity() != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult checked = check_properties(properties);
  if (checked != CUDA_SUCCESS) return checked;
  State& shared = state();
  const CUmemGenericAllocationHandle value = shared.next_handle();
  auto memory = shared.device(properties->location.id)->memory.create(size, value, *properties);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  shared.handles[value] = Handle{std::move(memory), 1};
  *handle = value;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Call call("cuMemRelease", Needs::kInit);
  if (call.refused()) return call.status();
  auto found = state().handles.find(handle);
  if (found == state().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.references == 0) state().handles.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* descriptor, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  Call call("cuMemExportToShareableHandle", Needs::kInit);
  if (call.refused()) return call.status();
  auto found = state().handles.find(handle);
  if (descriptor == nullptr || flags != 0 || found == state().handles.end() ||
      type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !found->second.memory->exportable()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int copy = fcntl(found->second.memory->fd(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(descriptor) = copy;
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                        CUmemAllocationHandleType type) {
  Call call("cuMemImportFromShareableHandle", Needs::kInit);
  if (call.refused()) return call.status();
  if (handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int file = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  State& shared = state();
  Device* const device = shared.device(DeviceMemory::ordinal_of(file));
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUmemGenericAllocationHandle value = shared.next_handle();
  auto memory = device->memory.import_file(file, value);
  if (memory == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  shared.handles[value] = Handle{std::move(memory), 1};
  *handle = value;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Call call("cuMemMap", Needs::kInit);
  if (call.refused()) return call.status();
  auto found = state().handles.find(handle);
  if (flags != 0 || found == state().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (offset != 0) return CUDA_ERROR_NOT_SUPPORTED;
  return state().space.map({address, size}, found->second.memory);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  Call call("cuMemUnmap", Needs::kInit);
  if (call.refused()) return call.status();
  const CUresult result = state().space.unmap({address, size});
  if (result == CUDA_SUCCESS) state().streams.report_use(call.name(), {address, size});
  return result;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* descriptions,
                        size_t count) {
  Call call("cuMemSetAccess", Needs::kInit);
  if (call.refused()) return call.status();
  if (descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const int devices = static_cast<int>(state().devices.size());
  return state().space.set_access({address, size}, descriptions, count, devices);
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr address) {
  Call call("cuMemGetAccess", Needs::kInit);
  if (call.refused()) return call.status();
  if (flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (state().device(location->id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  const Mapping* mapping = state().space.find(address);
  if (mapping == nullptr || mapping->from_alloc) return CUDA_ERROR_INVALID_VALUE;
  const size_t device = static_cast<size_t>(location->id);
  *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  if (device < mapping->access.size()) *flags = mapping->access[device];
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  Call call("cuMemRetainAllocationHandle", Needs::kInit);
  if (call.refused()) return call.status();
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Mapping* mapping = state().space.find(reinterpret_cast<uint64_t>(address));
  if (mapping == nullptr || mapping->from_alloc) return CUDA_ERROR_INVALID_VALUE;
  const CUmemGenericAllocationHandle value = mapping->memory->id();
  Handle& entry = state().handles[value];
  entry.memory = mapping->memory;
  ++entry.references;
  *handle = value;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  Call call("cuMemGetAllocationPropertiesFromHandle", Needs::kInit);
  if (call.refused()) return call.status();
  auto found = state().handles.find(handle);
  if (properties == nullptr || found == state().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *properties = found->second.memory->properties();
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
