#include "core/driver/context.h"

#include "core/driver/driver.h"

namespace memsaver {
namespace {

// The number of attempts to change or restore the thread's state, because a single refusal may be
// temporary.
constexpr int kTries = 3;

}  // namespace

ContextScope::ContextScope(const Context& context) {
  CUcontext current = nullptr;
  if (driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != context.context()) {
    CU_CHECK(cuCtxPushCurrent, context.context());
    pushed_ = true;
  }
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  for (int tries = 0; pushed_ && tries < kTries; ++tries) {
    pushed_ = driver().cuCtxPopCurrent(&popped) != CUDA_SUCCESS;
  }
}

DeviceScope::DeviceScope(const Context& context) : context_(context) {
  CUresult exchanged = CUDA_ERROR_UNKNOWN;
  for (int tries = 0; exchanged != CUDA_SUCCESS && tries < kTries; ++tries) {
    exchanged = driver().cuThreadExchangeStreamCaptureMode(&mode_);
  }
  check(exchanged, "cuThreadExchangeStreamCaptureMode");
}

DeviceScope::~DeviceScope() {
  // A thread that stayed in relaxed mode would miss errors in its own calls.
  bool exchanged = false;
  for (int tries = 0; !exchanged && tries < kTries; ++tries) {
    exchanged = driver().cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
}

}  // namespace memsaver
