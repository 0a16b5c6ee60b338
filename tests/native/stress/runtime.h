// The functions of the CUDA runtime that the stress test calls through the hooks of
// libmemsaver_preload.so. Each function returns a cudaError_t, which is 0 on success.
#pragma once

#include <cstddef>

extern "C" {
int cudaMalloc(void** pointer, size_t bytes);
int cudaFree(void* pointer);
int cudaMallocAsync(void** pointer, size_t bytes, void* stream);
int cudaFreeAsync(void* pointer, void* stream);
int cudaIpcGetMemHandle(void* handle, void* pointer);
int cudaGetDevice(int* device);
int cudaSetDevice(int device);
int cudaStreamIsCapturing(void* stream, int* status);
int cudaStreamSynchronize(void* stream);
int cudaThreadExchangeStreamCaptureMode(int* mode);
}
