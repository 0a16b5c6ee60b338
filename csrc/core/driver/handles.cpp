#include "core/driver/handles.h"

#include <atomic>
#include <utility>

#include "core/driver/driver.h"

namespace memsaver {
namespace {

using Memory = ObjectKind::Memory;
using Scope = ObjectKind::Scope;

constexpr ObjectKind kPhysicalMemory{
    "cuMemRelease",  "device memory",
    Memory::kDevice, Scope::kNone,
    false,           [](uint64_t handle, uint64_t) { return driver().cuMemRelease(handle); }};

constexpr ObjectKind kMappedRange{
    "cuMemUnmap",
    "device memory",
    Memory::kDevice,
    Scope::kNone,
    false,
    [](uint64_t address, uint64_t bytes) { return driver().cuMemUnmap(address, bytes); }};

constexpr ObjectKind kReservedRange{
    "cuMemAddressFree",
    "reserved addresses",
    Memory::kNone,
    Scope::kNone,
    false,
    [](uint64_t address, uint64_t bytes) { return driver().cuMemAddressFree(address, bytes); }};

// Destroying streams and events is legal under any capture.
constexpr ObjectKind kStream{"cuStreamDestroy",
                             nullptr,
                             Memory::kNone,
                             Scope::kContext,
                             false,
                             [](uint64_t stream, uint64_t) {
                               return driver().cuStreamDestroy(reinterpret_cast<CUstream>(stream));
                             }};

constexpr ObjectKind kEvent{
    "cuEventDestroy", nullptr, Memory::kNone, Scope::kContext, false, [](uint64_t event, uint64_t) {
      return driver().cuEventDestroy(reinterpret_cast<CUevent>(event));
    }};

constexpr ObjectKind kModule{
    "cuModuleUnload", nullptr, Memory::kNone, Scope::kDevice, false, [](uint64_t module, uint64_t) {
      return driver().cuModuleUnload(reinterpret_cast<CUmodule>(module));
    }};

uint64_t number(void* object) { return reinterpret_cast<uint64_t>(object); }

std::atomic<uint64_t> last_export_id{0};

}  // namespace

PhysicalMemory PhysicalMemory::create(const Device& device, uint64_t bytes, bool exportable) {
  DriverObject object(kPhysicalMemory), mapped(kMappedRange);
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device.ordinal();
  prop.allocFlags.gpuDirectRDMACapable = device.rdma_supported() ? 1 : 0;
  if (exportable) prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver().cuMemCreate(&handle, bytes, &prop, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    Error error(Status::kOutOfDeviceMemory, describe(result, "cuMemCreate"));
    error.call = "cuMemCreate";
    error.cuda_error = result;
    error.no_physical_memory = true;
    error.device = device.ordinal();
    error.needed_bytes = bytes;
    throw error;
  }
  check(result, "cuMemCreate");
  object.own(handle, bytes);
  return PhysicalMemory(std::move(object), std::move(mapped), exportable ? ++last_export_id : 0);
}

void PhysicalMemory::renew_export_id() noexcept {
  if (export_id_ != 0) export_id_ = ++last_export_id;
}

PhysicalMemory PhysicalMemory::import_from(int descriptor, uint64_t bytes) {
  DriverObject object(kPhysicalMemory), mapped(kMappedRange);
  CUmemGenericAllocationHandle handle = 0;
  // The call takes the descriptor itself, not its address.
  void* const value = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  CU_CHECK(cuMemImportFromShareableHandle, &handle, value,
           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  object.own(handle, bytes);
  return PhysicalMemory(std::move(object), std::move(mapped), 0);
}

Descriptor PhysicalMemory::export_memory() const {
  int number = -1;
  CU_CHECK(cuMemExportToShareableHandle, &number, handle(),
           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return Descriptor(number);
}

VaReservation VaReservation::reserve(uint64_t bytes, uint64_t alignment) {
  DriverObject whole(kReservedRange);
  CUdeviceptr address = 0;
  const CUresult result = driver().cuMemAddressReserve(&address, bytes, alignment, 0, 0);
  if (result == CUDA_SUCCESS) whole.own(address, bytes);
  if (result != CUDA_SUCCESS || address % alignment != 0) {
    whole = DriverObject(kReservedRange);
    CU_CHECK(cuMemAddressReserve, &address, bytes + alignment, 0, 0, 0);
    whole.own(address, bytes + alignment);
  }
  return VaReservation(std::move(whole), (address + alignment - 1) / alignment * alignment, bytes);
}

Mapping Mapping::map(uint64_t address, PhysicalMemory&& memory,
                     const std::vector<CUmemAccessDesc>& access) {
  Mapping mapping = place(address, std::move(memory));
  try {
    allow({address, mapping.bytes()}, access);
  } catch (...) {
    mapping.memory_.mapped_.release();
    memory = std::move(mapping.memory_);
    throw;
  }
  return mapping;
}

Mapping Mapping::place(uint64_t address, PhysicalMemory&& memory) {
  DriverObject& mapped = memory.mapped_;
  if (!mapped.has_room()) mapped = DriverObject(kMappedRange);
  CU_CHECK(cuMemMap, address, memory.bytes(), 0, memory.handle(), 0);
  mapped.own(address, memory.bytes());
  return Mapping(std::move(memory));
}

void Mapping::allow(const Range& range, const std::vector<CUmemAccessDesc>& access) {
  CU_CHECK(cuMemSetAccess, range.address, range.bytes, access.data(), access.size());
}

void Mapping::share(const std::vector<CUmemAccessDesc>& access) const {
  allow({address(), bytes()}, access);
}

PhysicalMemory Mapping::unmap() {
  memory_.mapped_.destroy();
  return std::move(memory_);
}

Stream Stream::create(const Device& device) {
  DeviceScope scope(device);
  Stream made;
  made.object_ = DriverObject(kStream, device);
  CUstream stream = nullptr;
  CU_CHECK(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  made.object_.own(number(stream));
  return made;
}

Event Event::create(const Device& device) {
  DeviceScope scope(device);
  Event made;
  made.object_ = DriverObject(kEvent, device);
  CUevent event = nullptr;
  CU_CHECK(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
  made.object_.own(number(event));
  return made;
}

void Event::record(CUstream stream) { CU_CHECK(cuEventRecord, get(), stream); }

void Event::wait() const { CU_CHECK(cuEventSynchronize, get()); }

Module Module::load(const Device& device, const void* image) {
  DeviceScope scope(device);
  Module made;
  made.object_ = DriverObject(kModule, device);
  CUmodule module = nullptr;
  CU_CHECK(cuModuleLoadData, &module, image);
  made.object_.own(number(module));
  return made;
}

}  // namespace memsaver
