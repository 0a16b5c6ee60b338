#include "core/device.h"

#include <algorithm>
#include <map>
#include <memory>

#include "core/driver.h"
#include "core/numa.h"

namespace memsaver {
namespace {

constexpr size_t kWaitBlockBytes = 512;

// Of what a scope changes and restores: a refusal is not taken at once.
constexpr int kTries = 3;

CUmemAllocationProp pinned_on(int ordinal) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = ordinal;
  return prop;
}

// The driver's names of all devices that the process sees, by their ordinals. Throws kDriverFailed.
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
  // Never destroyed, as the class says.
  static std::mutex* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Device>& device = (*devices)[ordinal];  // its place first: no device is given up
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
                    " has no virtual memory management, which memsaver is built on: use a GPU "
                    "and a driver that have it");
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
    driver().cuMemAlloc(&keeper_, kWaitBlockBytes);  // without it drain() is slower, no more
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

std::vector<CUmemAccessDesc> Device::access() const {
  CUmemAccessDesc own{};
  own.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  own.location.id = ordinal_;
  own.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  std::vector<CUmemAccessDesc> access{own};
  const uint64_t others = active() & ~(1ull << ordinal_);
  for (int other = 0; other < 64 && others >> other != 0; ++other) {
    if ((others >> other & 1) == 0) continue;
    int reachable = 0;
    CU_CHECK(cuDeviceCanAccessPeer, &reachable, handles()[other], device_);
    if (reachable) {
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

// cuCtxSynchronize would invalidate every stream capture of the context, whoever captures. Freeing
// a plain block, or unpinning a page, waits for the same work and does not (the conformance suite
// holds it: "what waits").
void Device::drain() {
  DeviceScope scope(*this);
  CUdeviceptr block = take_wait_block();
  if (block != 0) {
    const CUresult freed = driver().cuMemFree(block);
    if (freed == CUDA_SUCCESS) return;
    std::lock_guard<std::mutex> lock(mutex_);
    unfreed_.push_back(block);
    check(freed, "cuMemFree");
  }
  // The device is full to the last block: a page of the host does too, only slower. A page of its
  // own: unpinning waits for the device that pinned.
  std::lock_guard<std::mutex> lock(page_mutex_);
  if (!page_is_pinned_) CU_CHECK(cuMemHostRegister, page_, kPageBytes, 0);
  page_is_pinned_ = true;
  CU_CHECK(cuMemHostUnregister, page_);
  page_is_pinned_ = false;
}

void Device::drain_active() {
  const uint64_t devices = active();
  for (int ordinal = 0; ordinal < 64 && devices >> ordinal != 0; ++ordinal) {
    if ((devices >> ordinal & 1) != 0) get(ordinal).drain();
  }
}

// A plain block to free, or 0 where the device has no memory left.
CUdeviceptr Device::take_wait_block() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!unfreed_.empty()) {
      const CUdeviceptr block = unfreed_.back();
      unfreed_.pop_back();
      return block;
    }
  }
  CUdeviceptr block = 0;
  const CUresult result = driver().cuMemAlloc(&block, kWaitBlockBytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return 0;
  check(result, "cuMemAlloc");
  return block;
}

ContextScope::ContextScope(const Device& device) {
  CUcontext current = nullptr;
  if (driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != device.context()) {
    CU_CHECK(cuCtxPushCurrent, device.context());
    pushed_ = true;
  }
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  for (int tries = 0; pushed_ && tries < kTries; ++tries) {
    pushed_ = driver().cuCtxPopCurrent(&popped) != CUDA_SUCCESS;
  }
}

DeviceScope::DeviceScope(const Device& device) : context_(device) {
  CUresult exchanged = CUDA_ERROR_UNKNOWN;
  for (int tries = 0; exchanged != CUDA_SUCCESS && tries < kTries; ++tries) {
    exchanged = driver().cuThreadExchangeStreamCaptureMode(&mode_);
  }
  check(exchanged, "cuThreadExchangeStreamCaptureMode");
}

DeviceScope::~DeviceScope() {
  // A thread left in relaxed mode would miss errors of its own.
  bool exchanged = false;
  for (int tries = 0; !exchanged && tries < kTries; ++tries) {
    exchanged = driver().cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
}

}  // namespace memsaver
