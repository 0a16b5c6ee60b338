#include "streams.h"

#include <cuda.h>

namespace stress {
namespace {

// The device's primary context, current on this thread while it lives.
class Current {
 public:
  explicit Current(int device) : device_(device) {
    CUcontext context = nullptr;
    ok_ = cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS &&
          cuCtxPushCurrent(context) == CUDA_SUCCESS;
  }
  ~Current() {
    CUcontext context = nullptr;
    if (!ok_) return;
    cuCtxPopCurrent(&context);
    cuDevicePrimaryCtxRelease(device_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  bool ok() const { return ok_; }

 private:
  int device_;
  bool ok_;
};

}  // namespace

void* make_stream(int device) {
  const Current current(device);
  CUcontext kept = nullptr;  // for as long as the stream lives
  CUstream stream = nullptr;
  if (!current.ok() || cuDevicePrimaryCtxRetain(&kept, device) != CUDA_SUCCESS ||
      cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
    return nullptr;
  }
  return stream;
}

void destroy_stream(int device, void* stream) {
  const Current current(device);
  cuStreamDestroy(static_cast<CUstream>(stream));
  cuDevicePrimaryCtxRelease(device);
}

bool wait_for(int device, void* stream) {
  const Current current(device);
  return current.ok() && cuStreamSynchronize(static_cast<CUstream>(stream)) == CUDA_SUCCESS;
}

bool queue_fill(int device, void* stream, void* at, unsigned char byte, uint64_t bytes) {
  const Current current(device);
  return current.ok() && cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(at), byte, bytes,
                                         static_cast<CUstream>(stream)) == CUDA_SUCCESS;
}

}  // namespace stress
