// torch_allocator: the two signatures of torch's CUDAPluggableAllocator over the C ABI.
#include "memsaver.h"

extern "C" {

void* ms_torch_malloc(ptrdiff_t bytes, int device, void* stream) {
  void* pointer = nullptr;
  ms_error error;
  if (bytes > 0 &&
      ms_malloc_any(static_cast<uint64_t>(bytes), device, stream, &pointer, &error) != MS_OK) {
    ms_warn(error.message);
  }
  return pointer;
}

void ms_torch_free(void* pointer, size_t, int device, void*) {
  ms_error error;
  if (ms_free_any(pointer, device, &error) != MS_OK) ms_warn(error.message);
}

}  // extern "C"
