// The functions of the CUDA runtime that libmemsaver_preload.so interposes, and those it calls.
//
// This list is the only place that names them: the exported symbols, their signatures, the
// handlers that must exist and the table of real functions all come from it. A hook is one line
// here and one on_NAME in preload.cpp; without the latter the library does not link.
//
// The runtime's types are written out rather than included, so that one binary serves CUDA 11.2
// to 13: cudaError_t and the enumerations are int, cudaStream_t is a pointer, and the 64 bytes
// of a cudaIpcMemHandle_t are only ever passed on.
//
// Why each is here
//   cudaMalloc           what torch's caching allocator, graph capture and nearly everybody use.
//   cudaFree             takes back what cudaMalloc gave, and also memory of cudaMallocAsync.
//   cudaMallocAsync      torch's backend:cudaMallocAsync, CuPy's and RMM's asynchronous pools.
//   cudaFreeAsync        may be handed memory of ours, whichever function gave it.
//   ..._ptsz             the same two in programs built with --default-stream per-thread, whose
//                        headers rename them; stream 0 is then the thread's own stream.
//   cudaIpcGetMemHandle  memory of ours has no such handle. The runtime would say so with an error
//                        that it keeps, and torch would report it at an unrelated call later on.
//
// Why others are not
//   cudaMallocFromPoolAsync      names a pool that the caller made, limits, shares and trims.
//   cudaMallocManaged, ...Host   not device memory: they migrate, or live on the host.
//   cudaMallocPitch, 3D, Array   rows, textures and mipmaps have a layout that the driver picks.
//                                cudaFree and cudaFreeAsync pass their memory on as foreign.
//   cudaMemGetInfo               the driver's answer is right: paused memory is free.
//   cudaPointerGetAttributes, copies, memsets   work on mapped memory as on any other.
//   cudaDeviceReset              leaves memory of the virtual-memory calls as it is.
//   dlsym, dlopen                who asks a library for its own cudaMalloc gets that one, for
//                                allocating and for freeing alike; changing what dlsym means
//                                breaks other tools.
//   cuMemAlloc, cuMemCreate      the driver's own calls (torch's expandable segments, Numba, and
//                                runtimes linked in statically): the layer that this library
//                                stands on.
#ifndef MEMSAVER_HOOKS_PRELOAD_LIST_H_
#define MEMSAVER_HOOKS_PRELOAD_LIST_H_

// X(name, (parameters), arguments...): every one returns a cudaError_t.
#define MEMSAVER_HOOKS(X)                                                                       \
  X(cudaMalloc, (void** pointer, size_t bytes), pointer, bytes)                                 \
  X(cudaFree, (void* pointer), pointer)                                                         \
  X(cudaMallocAsync, (void** pointer, size_t bytes, void* stream), pointer, bytes, stream)      \
  X(cudaMallocAsync_ptsz, (void** pointer, size_t bytes, void* stream), pointer, bytes, stream) \
  X(cudaFreeAsync, (void* pointer, void* stream), pointer, stream)                              \
  X(cudaFreeAsync_ptsz, (void* pointer, void* stream), pointer, stream)                         \
  X(cudaIpcGetMemHandle, (void* handle, void* pointer), handle, pointer)

// Called, never interposed.
#define MEMSAVER_CALLED(X)                                              \
  X(cudaGetDevice, (int* device), device)                               \
  X(cudaStreamIsCapturing, (void* stream, int* status), stream, status) \
  X(cudaStreamSynchronize, (void* stream), stream)                      \
  X(cudaThreadExchangeStreamCaptureMode, (int* mode), mode)

#endif  // MEMSAVER_HOOKS_PRELOAD_LIST_H_
