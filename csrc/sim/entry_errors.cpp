// Entry points: names and descriptions of error codes. They can be called at any time, in any
// process.
#include <cuda.h>

namespace {

struct Error {
  CUresult code;
  const char* name;
  const char* text;
};

#define MEMSAVER_SIM_ERROR(code, text) {code, #code, text}

constexpr Error kErrors[] = {
    MEMSAVER_SIM_ERROR(CUDA_SUCCESS, "no error"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NOT_MAPPED, "resource not mapped"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU,
                       "no kernel image is available for execution on the device"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                       "the provided PTX was compiled with an unsupported toolchain."),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_ILLEGAL_STATE, "operation not permitted in this state"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                       "part or all of the requested memory range is already mapped"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                       "pointer does not correspond to a registered memory region"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                       "operation not permitted when stream is capturing"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                       "operation failed due to a previous error during capture"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE,
                       "operation would result in a merge of separate capture sequences"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
                       "capture was not ended in the same stream as it began"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                       "dependency created on uncaptured work in another stream"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                       "operation would make the legacy stream depend on a capturing blocking "
                       "stream"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_CAPTURED_EVENT,
                       "operation not permitted on an event last recorded in a capturing stream"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                       "attempt to terminate a thread-local capture sequence from another thread"),
    MEMSAVER_SIM_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

const Error* find(CUresult code) {
  for (const Error& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Error* found = find(error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Error* found = find(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
