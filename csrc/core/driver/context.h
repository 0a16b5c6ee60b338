// context: makes a driver context current on the calling thread, within a scope.
#pragma once

#include <cuda.h>

namespace memsaver {

// A context that lives as long as the process (a device's primary context; see device.h). A program
// may reset the context, after which entering it fails.
class Context {
 public:
  CUcontext context() const { return context_; }

 protected:
  Context() = default;
  ~Context() = default;
  CUcontext context_ = nullptr;
};

// Makes the context current on the calling thread while the scope exists. The constructor throws
// kDriverFailed. The destructor restores the previous context and ignores errors. This scope
// suffices for calls that are legal during every stream capture.
class ContextScope {
 public:
  explicit ContextScope(const Context& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

// Like ContextScope, but also prevents stream captures from forbidding the thread's driver calls.
// The constructor also throws kDriverFailed if the driver refuses three times to change the capture
// mode. In that case, the caller must not make a call that waits, because such a call would break a
// capture.
class DeviceScope {
 public:
  explicit DeviceScope(const Context& context);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  ContextScope context_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace memsaver
