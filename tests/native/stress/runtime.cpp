// A CUDA runtime in plain host memory behind the preload hooks, for calls outside of regions. Each
// thread has its own current device.
#include "runtime.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr int kMemoryAllocation = 2;

thread_local int current_device = 0;

int allocate(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return *pointer || bytes == 0 ? 0 : kMemoryAllocation;
}

int release(void* pointer) {
  std::free(pointer);
  return 0;
}

}  // namespace

extern "C" {

int cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
int cudaFree(void* pointer) { return release(pointer); }
int cudaMallocAsync(void** pointer, size_t bytes, void*) { return allocate(pointer, bytes); }
int cudaFreeAsync(void* pointer, void*) { return release(pointer); }
int cudaIpcGetMemHandle(void* handle, void*) {
  std::memset(handle, 0, 64);
  return 0;
}
int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}
int cudaSetDevice(int device) {
  current_device = device;
  return 0;
}
int cudaStreamIsCapturing(void*, int* status) {
  *status = 0;
  return 0;
}
int cudaStreamSynchronize(void*) { return 0; }
int cudaThreadExchangeStreamCaptureMode(int*) { return 0; }

}  // extern "C"
