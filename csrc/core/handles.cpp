#include "core/handles.h"

#include <mutex>
#include <utility>

#include "core/driver.h"
#include "core/log.h"
#include "core/text.h"

namespace memsaver {
namespace {

// Device memory whose undoing failed: an address that is still mapped (or 0), and a handle (or 0).
struct Stray {
  const Device* device;
  uint64_t address, bytes;
  CUmemGenericAllocationHandle handle;
};

struct Strays {
  std::mutex mutex;
  std::vector<Stray> list;
};

Strays& strays() {
  static Strays* const instance = new Strays;
  return *instance;
}

// Unmaps and releases what is left of it; true when nothing is.
bool collect(Stray& stray) noexcept {
  if (stray.address != 0) {
    const CUresult result = driver().cuMemUnmap(stray.address, stray.bytes);
    if (result != CUDA_SUCCESS && !is_shutdown(result)) return false;
    stray.address = 0;
  }
  if (stray.handle != 0) {
    const CUresult result = driver().cuMemRelease(stray.handle);
    if (result != CUDA_SUCCESS && !is_shutdown(result)) return false;
    stray.handle = 0;
  }
  return true;
}

void keep(Stray stray, CUresult result, const char* call) noexcept try {
  if (is_shutdown(result)) return;
  warn(describe(result, call) + "; " + format_bytes(stray.bytes) +
       " of device memory stay held and are tried again");
  Strays& s = strays();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.list.push_back(stray);
} catch (...) {
}

// For destructors: makes the call inside a scope, and a warning of what fails. Streams and events
// may be destroyed under any capture, so that a ContextScope will do.
template <typename Scope, typename Call>
void destroy(const Device& device, const char* name, Call call) noexcept {
  CUresult result = CUDA_SUCCESS;
  for (int tries = 0; tries < 2; ++tries) {  // a refusal is not taken at once
    try {
      Scope scope(device);
      result = call();
      if (result == CUDA_SUCCESS || is_shutdown(result)) return;
    } catch (...) {
      // Where there is none twice, the context is gone, and the object with it.
    }
  }
  if (result != CUDA_SUCCESS) warn_of([&] { return describe(result, name); });
}

}  // namespace

uint64_t collect_strays(const Device& device) noexcept {
  Strays& s = strays();
  std::lock_guard<std::mutex> lock(s.mutex);
  uint64_t held = 0;
  for (size_t i = 0; i < s.list.size();) {
    if (s.list[i].device == &device && collect(s.list[i])) {
      s.list[i] = s.list.back();
      s.list.pop_back();
    } else {
      if (s.list[i].device == &device) held += s.list[i].bytes;
      ++i;
    }
  }
  return held;
}

PhysicalMemory PhysicalMemory::create(const Device& device, uint64_t bytes) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device.ordinal();
  prop.allocFlags.gpuDirectRDMACapable = device.rdma_supported() ? 1 : 0;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver().cuMemCreate(&handle, bytes, &prop, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    Error error(Status::kOutOfDeviceMemory, describe(result, "cuMemCreate"));
    error.call = "cuMemCreate";
    error.cuda_error = result;
    error.device = device.ordinal();
    error.needed_bytes = bytes;
    throw error;
  }
  check(result, "cuMemCreate");
  return PhysicalMemory(device, bytes, handle);
}

PhysicalMemory::~PhysicalMemory() {
  if (!device_) return;
  const CUresult result = driver().cuMemRelease(handle_);
  if (result != CUDA_SUCCESS) keep({device_, 0, bytes_, handle_}, result, "cuMemRelease");
}

VaReservation VaReservation::reserve(uint64_t bytes, uint64_t alignment) {
  VaReservation made;
  CUdeviceptr address = 0;
  uint64_t whole = bytes;
  CUresult result = driver().cuMemAddressReserve(&address, whole, alignment, 0, 0);
  if (result != CUDA_SUCCESS || address % alignment != 0) {
    if (result == CUDA_SUCCESS) driver().cuMemAddressFree(address, whole);
    whole = bytes + alignment;
    CU_CHECK(cuMemAddressReserve, &address, whole, 0, 0, 0);
  }
  made.whole_address_ = address;
  made.whole_bytes_ = whole;
  made.address_ = (address + alignment - 1) / alignment * alignment;
  made.bytes_ = bytes;
  return made;
}

VaReservation::~VaReservation() {
  if (whole_bytes_ == 0) return;
  const CUresult result = driver().cuMemAddressFree(whole_address_, whole_bytes_);
  if (result != CUDA_SUCCESS && !is_shutdown(result)) {
    warn_of([&] {
      return describe(result, "cuMemAddressFree") + "; " + format_bytes(whole_bytes_) +
             " of addresses stay reserved";
    });
  }
}

Mapping Mapping::map(uint64_t address, PhysicalMemory&& memory,
                     const std::vector<CUmemAccessDesc>& access) {
  CU_CHECK(cuMemMap, address, memory.bytes(), 0, memory.handle(), 0);
  const CUresult result =
      driver().cuMemSetAccess(address, memory.bytes(), access.data(), access.size());
  if (result != CUDA_SUCCESS) {
    const CUresult undone = driver().cuMemUnmap(address, memory.bytes());
    if (undone != CUDA_SUCCESS)
      keep({memory.device(), address, memory.bytes(), 0}, undone, "cuMemUnmap");
    check(result, "cuMemSetAccess");
  }
  return Mapping(address, std::move(memory));
}

void Mapping::share(const std::vector<CUmemAccessDesc>& access) const {
  CU_CHECK(cuMemSetAccess, address_, bytes(), access.data(), access.size());
}

Mapping::~Mapping() {
  if (!memory_.device()) return;
  const CUresult result = driver().cuMemUnmap(address_, memory_.bytes());
  if (result != CUDA_SUCCESS)
    keep({memory_.device(), address_, memory_.bytes(), 0}, result, "cuMemUnmap");
}

PhysicalMemory Mapping::unmap() {
  CU_CHECK(cuMemUnmap, address_, memory_.bytes());
  address_ = 0;
  return std::move(memory_);
}

PinnedRange PinnedRange::pin(void* start, uint64_t bytes, unsigned int flags) {
  const CUresult result = driver().cuMemHostRegister(start, bytes, flags);
  if (result != CUDA_SUCCESS) {
    Error error(Status::kOutOfHostMemory,
                describe(result, "cuMemHostRegister") + ", for " + format_bytes(bytes));
    error.call = "cuMemHostRegister";
    error.cuda_error = result;
    error.needed_bytes = bytes;
    throw error;
  }
  PinnedRange made;
  made.start_ = start;
  made.bytes_ = bytes;
  return made;
}

void PinnedRange::unpin() {
  CU_CHECK(cuMemHostUnregister, start_);
  start_ = nullptr;
  bytes_ = 0;
}

PinnedRange::~PinnedRange() {
  if (!start_) return;
  const CUresult result = driver().cuMemHostUnregister(start_);
  if (result != CUDA_SUCCESS && !is_shutdown(result)) {
    warn_of([&] {
      return describe(result, "cuMemHostUnregister") + "; " + format_bytes(bytes_) +
             " of host memory stay pinned";
    });
  }
}

Stream Stream::create(const Device& device) {
  DeviceScope scope(device);
  CUstream stream = nullptr;
  CU_CHECK(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  Stream made;
  made.device_ = &device;
  made.stream_ = stream;
  return made;
}

Stream::~Stream() {
  if (stream_)
    destroy<ContextScope>(*device_, "cuStreamDestroy",
                          [this] { return driver().cuStreamDestroy(stream_); });
}

Event Event::create(const Device& device) {
  DeviceScope scope(device);
  CUevent event = nullptr;
  CU_CHECK(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
  Event made;
  made.device_ = &device;
  made.event_ = event;
  return made;
}

Event::~Event() {
  if (event_)
    destroy<ContextScope>(*device_, "cuEventDestroy",
                          [this] { return driver().cuEventDestroy(event_); });
}

void Event::record(CUstream stream) { CU_CHECK(cuEventRecord, event_, stream); }

void Event::wait() const { CU_CHECK(cuEventSynchronize, event_); }

Module Module::load(const Device& device, const void* image) {
  DeviceScope scope(device);
  CUmodule module = nullptr;
  CU_CHECK(cuModuleLoadData, &module, image);
  Module made;
  made.device_ = &device;
  made.module_ = module;
  return made;
}

Module::~Module() {
  if (module_) {
    destroy<DeviceScope>(*device_, "cuModuleUnload",
                         [this] { return driver().cuModuleUnload(module_); });
  }
}

}  // namespace memsaver
