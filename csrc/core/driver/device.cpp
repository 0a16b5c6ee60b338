#include "core/driver/device.h"

#include <algorithm>
#include <map>
#include <memory>
#include <new>

#include "core/driver/driver.h"
#include "core/platform/numa.h"

namespace memsaver {
namespace {

constexpr size_t kWaitBlockBytes = 512;

// A plain block of device memory. Freeing it waits for all work on the device.
constexpr ObjectKind kWaitBlock{"cuMemFree",
                                "device memory",
                                ObjectKind::Memory::kDevice,
                                ObjectKind::Scope::kDevice,
                                true,
                                [](uint64_t block, uint64_t) { return driver().cuMemFree(block); }};

CUmemAllocationProp pinned_on(int ordinal) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = ordinal;
  return prop;
}

// Returns the driver's handles of all devices that the process sees, by ordinal. Throws
// kDriverFailed.
const std::vector<CUdevice>& handles() {
  static const auto* const found = [] {
    int count = 0;
    CU_CHECK(cuDeviceGetCount, &count);
    auto made = std::make_unique<std::vector<CUdevice>>(count);
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      CU_CHECK(cuDeviceGet, &(*made)[ordinal], ordinal);
    }
    return made.release();
  }();
  return *found;
}

}  // namespace

int Device::count() { return static_cast<int>(handles().size()); }

int Device::current() {
  CUdevice device = 0;
  return driver().cuCtxGetDevice(&device) == CUDA_SUCCESS ? static_cast<int>(device) : 0;
}

Device& Device::get(int ordinal) {
  // Never destroyed, because devices live as long as the process.
  static std::mutex* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>;
  std::lock_guard<std::mutex> lock(*mutex);
  // Adds the entry before creating the device, so that no device is lost.
  std::unique_ptr<Device>& device = (*devices)[ordinal];
  if (!device) device.reset(new Device(ordinal));
  return *device;
}

Device::Device(int ordinal) : ordinal_(ordinal) {
  const int devices = count();
  if (ordinal < 0 || ordinal >= devices) {
    throw Error(Status::kInvalidArgument, "there is no device " + std::to_string(ordinal) +
                                              ": this process sees " + std::to_string(devices));
  }
  device_ = handles()[ordinal];
  int supported = 0;
  CU_CHECK(cuDeviceGetAttribute, &supported,
           CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_);
  if (!supported) {
    throw Error(Status::kNotLoaded,
                "device " + std::to_string(ordinal) +
                    " has no virtual memory management, which memsaver requires: use a GPU and a "
                    "driver that support it");
  }
  const CUmemAllocationProp prop = pinned_on(ordinal);
  size_t granularity = 0;
  CU_CHECK(cuMemGetAllocationGranularity, &granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  granularity_ = granularity;
  int rdma = 0;
  CU_CHECK(cuDeviceGetAttribute, &rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
           device_);
  rdma_supported_ = rdma != 0;
  char bus_id[32] = {};
  if (driver().cuDeviceGetPCIBusId(bus_id, sizeof(bus_id), device_) == CUDA_SUCCESS) {
    bus_id_ = bus_id;
    numa_node_ = numa_node_of_pci(bus_id_);
  }
  CU_CHECK(cuDevicePrimaryCtxRetain, &context_, device_);
  try {
    DeviceScope scope(*this);
    total_bytes_ = memory().total_bytes;
    driver().cuMemAlloc(&keeper_, kWaitBlockBytes);  // if this fails, drain() is only slower
  } catch (...) {
    driver().cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

void Device::adopt_thread() const noexcept {
  CUcontext current = nullptr;
  if (driver().cuCtxGetCurrent(&current) == CUDA_SUCCESS && !current) {
    driver().cuCtxPushCurrent(context_);
  }
}

uint64_t Device::probe_free_bytes(int ordinal) {
  struct Borrowed : Context {
    explicit Borrowed(CUdevice device) : device(device) {
      CU_CHECK(cuDevicePrimaryCtxRetain, &context_, device);
    }
    ~Borrowed() { driver().cuDevicePrimaryCtxRelease(device); }
    const CUdevice device;
  };
  const Borrowed context(handles()[ordinal]);
  DeviceScope scope(context);
  size_t free_bytes = 0, total_bytes = 0;
  CU_CHECK(cuMemGetInfo, &free_bytes, &total_bytes);
  return free_bytes;
}

Device::Memory Device::memory() const {
  DeviceScope scope(*this);
  size_t free_bytes = 0, total_bytes = 0;
  CU_CHECK(cuMemGetInfo, &free_bytes, &total_bytes);
  return {free_bytes, total_bytes};
}

uint64_t Device::active() {
  uint64_t mask = 0;
  const int devices = std::min(count(), 64);
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    unsigned int flags = 0;
    int active = 0;
    CU_CHECK(cuDevicePrimaryCtxGetState, handles()[ordinal], &flags, &active);
    if (active) mask |= 1ull << ordinal;
  }
  return mask;
}

bool Device::can_access(int from, int to) {
  int accessible = 0;
  CU_CHECK(cuDeviceCanAccessPeer, &accessible, handles()[from], handles()[to]);
  return accessible != 0;
}

std::vector<CUmemAccessDesc> Device::access() const {
  CUmemAccessDesc own{};
  own.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  own.location.id = ordinal_;
  own.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  std::vector<CUmemAccessDesc> access{own};
  const uint64_t others = active() & ~(1ull << ordinal_);
  for (int other = 0; other < 64 && others >> other != 0; ++other) {
    if ((others >> other & 1) == 0) continue;
    if (can_access(other, ordinal_)) {
      access.push_back(own);
      access.back().location.id = other;
    }
  }
  return access;
}

CUstream Device::copy_stream(Direction direction) {
  std::lock_guard<std::mutex> lock(mutex_);
  CUstream& stream = copy_streams_[direction == Direction::kToHost ? 0 : 1];
  if (!stream) {
    DeviceScope scope(*this);
    CU_CHECK(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  }
  return stream;
}

// cuCtxSynchronize would invalidate every stream capture in the context, on any thread. Freeing a
// plain block or unpinning a page waits for the same work without invalidating captures (the
// conformance suite verifies this: "what waits").
void Device::drain() {
  DeviceScope scope(*this);
  std::unique_lock<std::mutex> lock(page_mutex_);
  if (pinned_page_.bytes() == 0) {
    lock.unlock();
    if (DriverObject block = allocate_wait_block()) {
      try {
        block.destroy();
      } catch (...) {
        block.defer();
        throw;
      }
      return;
    }
    lock.lock();
  }
  // No plain block can be allocated (the device or the host is out of memory), or an earlier
  // unpinning was refused. Unpinning a host page waits for the same work, only more slowly. Each
  // device has its own page, because unpinning waits for the device that pinned it.
  if (pinned_page_.bytes() == 0) pinned_page_.pin(page_, kPageBytes, 0);
  pinned_page_.unpin();
}

void Device::drain_active() {
  const uint64_t devices = active();
  for (int ordinal = 0; ordinal < 64 && devices >> ordinal != 0; ++ordinal) {
    if ((devices >> ordinal & 1) != 0) get(ordinal).drain();
  }
}

// Returns a plain block to free, or an empty object if the device or the host is out of memory.
DriverObject Device::allocate_wait_block() try {
  DriverObject block(kWaitBlock, *this);
  CUdeviceptr address = 0;
  const CUresult result = driver().cuMemAlloc(&address, kWaitBlockBytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return {};
  check(result, "cuMemAlloc");
  block.own(address, kWaitBlockBytes);
  return block;
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace memsaver
