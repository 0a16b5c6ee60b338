// The functions of the CUDA runtime that libmemsaver_preload.so interposes, and the functions that
// it calls.
//
// The exported symbols, their signatures, the handlers and the table of real functions are all
// generated from this list. A hook consists of one line in this list and one on_NAME in
// preload.cpp; without on_NAME, the library does not link.
//
// The runtime's types are written out, and its headers are not included, so that one binary
// supports CUDA 11.2 to 13. cudaError_t and the enumerations are int, cudaStream_t is a pointer,
// and the 64 bytes of a cudaIpcMemHandle_t are only forwarded.
//
// These functions are interposed:
//   - cudaMalloc is used by torch's caching allocator, graph capture and most programs.
//   - cudaFree frees memory from cudaMalloc and from cudaMallocAsync.
//   - cudaMallocAsync is used by torch's backend:cudaMallocAsync, and by CuPy's and RMM's pools.
//   - cudaFreeAsync can receive memsaver's memory from either allocation function.
//   - The variants ..._ptsz replace cudaMallocAsync and cudaFreeAsync in programs built with
//     --default-stream per-thread, whose headers rename the functions. In these variants, stream 0
//     is the thread's own stream.
//   - cudaIpcGetMemHandle cannot return a handle for memsaver's memory. Without the hook, the
//     runtime would record an error, and torch would report it at a later, unrelated call.
//
// These functions are not interposed:
//   - cudaMallocFromPoolAsync uses a pool that the caller creates, limits, shares and trims.
//   - cudaMallocManaged and ...Host do not allocate device memory: their memory migrates or is on
//     the host.
//   - cudaMallocPitch, 3D and Array allocate rows, textures and mipmaps, whose layout the driver
//     chooses. The hooks of cudaFree and cudaFreeAsync forward such memory to the runtime.
//   - cudaMemGetInfo returns the driver's answer, which is correct because paused memory is free.
//   - cudaPointerGetAttributes, copies and memsets work on mapped memory as they do on other
//     memory.
//   - cudaDeviceReset does not change memory from the virtual-memory calls.
//   - dlsym and dlopen need no hook: a program that looks up a library's own cudaMalloc gets that
//     function, for allocations and frees alike. An interposed dlsym would break other tools.
//   - cuMemAlloc and cuMemCreate are the driver's own calls, which torch's expandable segments,
//     Numba and statically linked runtimes use. This library itself uses the same calls.
#ifndef MEMSAVER_HOOKS_PRELOAD_LIST_H_
#define MEMSAVER_HOOKS_PRELOAD_LIST_H_

// X(name, (parameters), arguments...): each function returns a cudaError_t.
#define MEMSAVER_HOOKS(X)                                                                       \
  X(cudaMalloc, (void** pointer, size_t bytes), pointer, bytes)                                 \
  X(cudaFree, (void* pointer), pointer)                                                         \
  X(cudaMallocAsync, (void** pointer, size_t bytes, void* stream), pointer, bytes, stream)      \
  X(cudaMallocAsync_ptsz, (void** pointer, size_t bytes, void* stream), pointer, bytes, stream) \
  X(cudaFreeAsync, (void* pointer, void* stream), pointer, stream)                              \
  X(cudaFreeAsync_ptsz, (void* pointer, void* stream), pointer, stream)                         \
  X(cudaIpcGetMemHandle, (void* handle, void* pointer), handle, pointer)

// Called, but not interposed.
#define MEMSAVER_CALLED(X)                                              \
  X(cudaGetDevice, (int* device), device)                               \
  X(cudaStreamIsCapturing, (void* stream, int* status), stream, status) \
  X(cudaStreamSynchronize, (void* stream), stream)                      \
  X(cudaThreadExchangeStreamCaptureMode, (int* mode), mode)

#endif  // MEMSAVER_HOOKS_PRELOAD_LIST_H_
