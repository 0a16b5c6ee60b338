#include "faults.h"

#include <algorithm>

namespace memsaver::sim {
namespace {

constexpr const char* kCalls[] = {
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxGetDevice",
    "cuCtxSynchronize",
    "cuMemGetInfo",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAccess",
    "cuMemRetainAllocationHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer",
    "cuPointerGetAttribute",
    "cuMemcpyHtoD",
    "cuMemcpyDtoH",
    "cuMemcpyDtoD",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemsetD8",
    "cuMemsetD32",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuThreadExchangeStreamCaptureMode",
    "cuLaunchHostFunc",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuEventDestroy",
};

}  // namespace

Faults::Faults() {
  for (const char* call : kCalls) entries_[call];
}

int64_t Faults::add(const Fault& fault) {
  auto found = entries_.find(fault.call);
  if (found == entries_.end() || fault.nth == 0) return -1;
  const int64_t number = added_++;
  found->second.pending.push_back(
      {number, fault.nth - 1, static_cast<CUresult>(fault.code), fault.times});
  return number;
}

void Faults::remove(int64_t number) {
  for (auto& [name, entry] : entries_) {
    auto& pending = entry.pending;
    pending.erase(std::remove_if(pending.begin(), pending.end(),
                                 [&](const Pending& one) { return one.number == number; }),
                  pending.end());
  }
}

void Faults::clear() {
  for (auto& [name, entry] : entries_) entry.pending.clear();
}

CUresult Faults::count(std::string_view call) {
  auto found = entries_.find(call);
  if (found == entries_.end()) return CUDA_ERROR_UNKNOWN;  // a name missing from kCalls
  Entry& entry = found->second;
  ++entry.calls;
  CUresult result = CUDA_SUCCESS;
  for (size_t i = 0; i < entry.pending.size();) {
    Pending& fault = entry.pending[i];
    if (fault.calls_before > 0) {
      --fault.calls_before;
      ++i;
      continue;
    }
    if (result == CUDA_SUCCESS) result = fault.code;
    if (fault.times != 0 && --fault.times == 0) {
      entry.pending.erase(entry.pending.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return result;
}

uint64_t Faults::calls(std::string_view call) const {
  auto found = entries_.find(call);
  return found == entries_.end() ? 0 : found->second.calls;
}

}  // namespace memsaver::sim
