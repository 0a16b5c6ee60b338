// torch_allocator: the two functions of torch's CUDAPluggableAllocator, on top of the C ABI.
//
// torch passes no context to an allocator's functions, so the pools of each tag have their own
// function: one of a fixed number of compiled functions, bound to its tag permanently.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "memsaver.h"

namespace {

constexpr size_t kPlaces = 256;

// Copies of tag names. An entry is written once, before its function is returned to a caller.
std::atomic<const char*> bound[kPlaces];
std::mutex binding;

void* allocate(ptrdiff_t bytes, int device, void* stream) {
  void* pointer = nullptr;
  ms_error error;
  if (bytes > 0 &&
      ms_malloc_any(static_cast<uint64_t>(bytes), device, stream, &pointer, &error) != MS_OK) {
    ms_warn(error.message);
  }
  return pointer;
}

template <size_t Place>
void* allocate_for(ptrdiff_t bytes, int device, void* stream) {
  ms_error error;
  // Waits while a transition of the tag is in progress, and fails while the tag is paused.
  if (ms_region_enter(bound[Place].load(std::memory_order_acquire), MS_BACKUP_DEFAULT, &error) !=
      MS_OK) {
    ms_warn(error.message);
    return nullptr;
  }
  void* const pointer = allocate(bytes, device, stream);
  ms_region_exit(nullptr);
  return pointer;
}

template <size_t... Places>
ms_torch_malloc_function function_at(size_t place, std::index_sequence<Places...>) {
  static constexpr ms_torch_malloc_function kFunctions[] = {allocate_for<Places>...};
  return kFunctions[place];
}

ms_status refuse(ms_status status, const char* message, ms_error* error) {
  if (error) {
    *error = ms_error{};
    error->status = status;
    error->device = -1;
    std::snprintf(error->message, sizeof(error->message), "%s", message);
  }
  return status;
}

}  // namespace

extern "C" {

void* ms_torch_malloc(ptrdiff_t bytes, int device, void* stream) {
  return allocate(bytes, device, stream);
}

void ms_torch_free(void* pointer, size_t, int device, void*) {
  ms_error error;
  if (ms_free_any(pointer, device, &error) != MS_OK) ms_warn(error.message);
}

ms_status ms_torch_malloc_of(const char* tag, int backup, ms_torch_malloc_function* function,
                             ms_error* error) {
  if (!function) return refuse(MS_INVALID_ARGUMENT, "the pointer for the result is null", error);
  const ms_status entered = ms_region_enter(tag, backup, error);  // creates the tag, or fails
  if (entered != MS_OK) return entered;
  ms_region_exit(nullptr);
  const std::lock_guard<std::mutex> lock(binding);
  for (size_t place = 0; place < kPlaces; ++place) {
    const char* const name = bound[place].load(std::memory_order_relaxed);
    if (name && std::strcmp(name, tag) != 0) continue;
    if (!name) {
      const char* const copy = strdup(tag);
      if (!copy) return refuse(MS_OUT_OF_HOST_MEMORY, "the process has no host memory left", error);
      bound[place].store(copy, std::memory_order_release);
    }
    *function = function_at(place, std::make_index_sequence<kPlaces>());
    return MS_OK;
  }
  return refuse(MS_INVALID_STATE,
                "256 tags already have torch pools, which is the maximum: use one of them, or "
                "regions",
                error);
}

}  // extern "C"
