// The functions of the CUDA runtime that libmemsaver_preload.so interposes, and those it calls.
//
// All uses are generated from this list: the exported symbols, their signatures, the handlers and
// the table of real functions. A hook is one line here and one on_NAME in preload.cpp; without the
// latter the library does not link.
//
// The runtime's types are written out instead of included, so that one binary supports CUDA 11.2 to
// 13: cudaError_t and the enumerations are int, cudaStream_t is a pointer, and the 64 bytes of a
// cudaIpcMemHandle_t are only forwarded.
//
// Reason for each function
//   cudaMalloc           used by torch's caching allocator, graph capture and most programs.
//   cudaFree             frees memory of cudaMalloc and also of cudaMallocAsync.
//   cudaMallocAsync      used by torch's backend:cudaMallocAsync, and by CuPy's and RMM's pools.
//   cudaFreeAsync        may receive memsaver's memory of either allocation function.
//   ..._ptsz             the same two in programs built with --default-stream per-thread, whose
//                        headers rename them; stream 0 is then the thread's own stream.
//   cudaIpcGetMemHandle  memsaver's memory has no such handle. The runtime would record an error,
//                        and torch would report it at a later, unrelated call.
//
// Reason for not interposing others
//   cudaMallocFromPoolAsync      names a pool that the caller creates, limits, shares and trims.
//   cudaMallocManaged, ...Host   not device memory: they migrate, or are on the host.
//   cudaMallocPitch, 3D, Array   rows, textures and mipmaps have a layout that the driver chooses.
//                                cudaFree and cudaFreeAsync forward it to the runtime.
//   cudaMemGetInfo               the driver's answer is correct: paused memory is free.
//   cudaPointerGetAttributes, copies, memsets   work on mapped memory as on other memory.
//   cudaDeviceReset              does not change memory from the virtual-memory calls.
//   dlsym, dlopen                a program that looks up a library's own cudaMalloc gets that
//                                function, for allocations and frees alike; a changed dlsym
//                                would break other tools.
//   cuMemAlloc, cuMemCreate      the driver's own calls (torch's expandable segments, Numba, and
//                                runtimes linked in statically): the layer that this library
//                                uses itself.
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
