// The hooks: each calls either the C ABI of memsaver.h or the real function of the CUDA runtime.
#include <string.h>

#include "hooks/preload_runtime.h"
#include "memsaver.h"

namespace memsaver::hooks {
namespace {

// Values of cudaError_t, which are the same in every version.
constexpr int kSuccess = 0;
constexpr int kErrorInvalidValue = 1;
constexpr int kErrorMemoryAllocation = 2;
constexpr int kErrorInitializationError = 3;
constexpr int kErrorNotSupported = 801;
constexpr int kErrorStreamCaptureUnsupported = 900;
constexpr int kErrorUnknown = 999;

constexpr int kCaptureNone = 0;     // of cudaStreamCaptureStatus
constexpr int kCaptureRelaxed = 2;  // of cudaStreamCaptureMode

constexpr int kNotServed = -1;

// Calls the real function, as if this library were absent.
template <Call call, typename... Arguments>
inline int forward(const void* caller, Arguments... arguments) {
  auto* function = real<call>(caller);
  return __builtin_expect(function != nullptr, 1) ? function(arguments...)
                                                  : kErrorInitializationError;
}

// Maps stream 0 to the thread's own stream: programs built with per-thread default streams mean
// this stream.
void* per_thread(void* stream) {
  return stream != nullptr ? stream : reinterpret_cast<void*>(uintptr_t{2});
}

// Returns whether the process's libmemsaver.so, the first that was loaded, is the one beside this
// library. If another installation's library was loaded first, its own hooks serve the process, and
// these hooks do nothing.
bool has_own_core() {
  static const bool own = [] {
    const bool same = strcmp(ms_version(), MEMSAVER_VERSION) == 0;
    if (!same) {
      ms_warn("libmemsaver_preload.so of memsaver " MEMSAVER_VERSION
              " does nothing, because the process loaded another version of libmemsaver.so: "
              "name one installation in LD_PRELOAD");
    }
    return same;
  }();
  return own;
}

// Allocates tagged memory in *pointer, or returns a cudaError_t. Returns kNotServed if the real
// function should serve the call. This happens if the runtime cannot determine a device or there is
// no driver (the real function's error says why), or if the process's tag was paused or the process
// forked between the check and the allocation.
[[gnu::cold, gnu::noinline]] int allocate(const void* caller, void** pointer, size_t bytes) {
  if (!has_own_core()) return kNotServed;
  // Until a thread's runtime has created a context, only the runtime knows its current device.
  int device = -1;
  auto* get_device = real<Call::cudaGetDevice>(caller);
  if (get_device != nullptr && get_device(&device) != kSuccess) return kNotServed;
  void* memory = nullptr;
  ms_error error;
  switch (ms_malloc(bytes, device, &memory, &error)) {
    case MS_OK:
      *pointer = memory;
      return kSuccess;
    case MS_NOT_LOADED:
    case MS_INVALID_STATE:
      return kNotServed;
    case MS_OUT_OF_DEVICE_MEMORY:
    case MS_OUT_OF_HOST_MEMORY:
      ms_warn(error.message);  // the hook's signature cannot return the message
      return kErrorMemoryAllocation;
    default:  // not an out-of-memory error, after which torch would free memory and try again
      ms_warn(error.message);
      return kErrorUnknown;
  }
}

[[gnu::cold, gnu::noinline]] int release(void* pointer) {
  ms_error error;
  switch (ms_free(pointer, &error)) {
    case MS_OK:
      return kSuccess;
    case MS_NOT_OURS:  // an interior pointer, or memory that was already freed
    case MS_INVALID_ARGUMENT:
      return kErrorInvalidValue;
    case MS_INVALID_STATE:  // the runtime's error in a forked child
    case MS_NOT_LOADED:
      return kErrorInitializationError;
    default:
      ms_warn(error.message);
      return kErrorUnknown;
  }
}

inline bool wanted(void** pointer, size_t bytes) {
  return __builtin_expect(ms_wants() != 0, 0) && pointer != nullptr && bytes != 0;
}

// Sets *capturing to whether work on the stream is captured into a graph. Returns 0 or a
// cudaError_t.
int query_capturing(const void* caller, void* stream, bool* capturing) {
  int status = kCaptureNone;
  const int error = forward<Call::cudaStreamIsCapturing>(caller, stream, &status);
  *capturing = status != kCaptureNone;
  return error;
}

// During a capture, an allocation is a node of the graph and is freed by another node, so the
// runtime serves it. Otherwise, memory that is available at once is valid for any order of work on
// the stream.
[[gnu::cold, gnu::noinline]] int allocate_on_stream(const void* caller, void** pointer,
                                                    size_t bytes, void* stream) {
  bool capturing = false;
  if (query_capturing(caller, stream, &capturing) != kSuccess || capturing) return kNotServed;
  return allocate(caller, pointer, bytes);
}

// Waits for the stream's work, then frees. While the stream is being captured, nothing is freed,
// because the graph may use the memory at every replay, and a wait would end the capture. In that
// case, returns an error, as the runtime does for memory from outside the graph.
[[gnu::cold, gnu::noinline]] int release_on_stream(const void* caller, void* pointer,
                                                   void* stream) {
  bool capturing = false;
  if (const int error = query_capturing(caller, stream, &capturing)) return error;
  if (capturing) return kErrorStreamCaptureUnsupported;
  // In the default mode, waiting while another thread captures is forbidden and breaks the capture.
  // The relaxed mode allows it, because this stream is not part of that capture.
  int mode = kCaptureRelaxed;
  const bool exchanged =
      forward<Call::cudaThreadExchangeStreamCaptureMode>(caller, &mode) == kSuccess;
  const int error = forward<Call::cudaStreamSynchronize>(caller, stream);
  if (exchanged) forward<Call::cudaThreadExchangeStreamCaptureMode>(caller, &mode);
  return error != kSuccess ? error : release(pointer);
}

inline int on_cudaMalloc(const void* caller, void** pointer, size_t bytes) {
  if (wanted(pointer, bytes)) {
    const int result = allocate(caller, pointer, bytes);
    if (result != kNotServed) return result;
  }
  return forward<Call::cudaMalloc>(caller, pointer, bytes);
}

inline int on_cudaFree(const void* caller, void* pointer) {
  if (__builtin_expect(ms_owns(pointer) != 0, 0)) return release(pointer);
  return forward<Call::cudaFree>(caller, pointer);
}

template <Call call>
inline int malloc_async(const void* caller, void** pointer, size_t bytes, void* stream,
                        void* meant) {
  if (wanted(pointer, bytes)) {
    const int result = allocate_on_stream(caller, pointer, bytes, meant);
    if (result != kNotServed) return result;
  }
  return forward<call>(caller, pointer, bytes, stream);
}

inline int on_cudaMallocAsync(const void* caller, void** pointer, size_t bytes, void* stream) {
  return malloc_async<Call::cudaMallocAsync>(caller, pointer, bytes, stream, stream);
}

inline int on_cudaMallocAsync_ptsz(const void* caller, void** pointer, size_t bytes, void* stream) {
  return malloc_async<Call::cudaMallocAsync_ptsz>(caller, pointer, bytes, stream,
                                                  per_thread(stream));
}

inline int on_cudaFreeAsync(const void* caller, void* pointer, void* stream) {
  if (__builtin_expect(ms_owns(pointer) != 0, 0)) {
    return release_on_stream(caller, pointer, stream);
  }
  return forward<Call::cudaFreeAsync>(caller, pointer, stream);
}

inline int on_cudaFreeAsync_ptsz(const void* caller, void* pointer, void* stream) {
  if (__builtin_expect(ms_owns(pointer) != 0, 0)) {
    return release_on_stream(caller, pointer, per_thread(stream));
  }
  return forward<Call::cudaFreeAsync_ptsz>(caller, pointer, stream);
}

inline int on_cudaIpcGetMemHandle(const void* caller, void* handle, void* pointer) {
  if (ms_owns(pointer) != 0) return kErrorNotSupported;
  return forward<Call::cudaIpcGetMemHandle>(caller, handle, pointer);
}

}  // namespace
}  // namespace memsaver::hooks

#define X(name, parameters, ...)                                                 \
  extern "C" __attribute__((visibility("default"))) int name parameters {        \
    return memsaver::hooks::on_##name(__builtin_return_address(0), __VA_ARGS__); \
  }
MEMSAVER_HOOKS(X)
#undef X
