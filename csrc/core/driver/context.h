// context: makes a driver context current on the calling thread, within a scope.
#pragma once

#include <cuda.h>

namespace memsaver {

// A context that lives as long as the process (a device's primary context; see device.h). A program
// may reset it; entering it then fails.
class Context {
 public:
  CUcontext context() const { return context_; }

 protected:
  Context() = default;
  ~Context() = default;
  CUcontext context_ = nullptr;
};

// Makes the context current on the calling thread while it exists. The destructor restores the
// previous context, and ignores errors. Throws kDriverFailed. It suffices for calls that are legal
// during every stream capture.
class ContextScope {
 public:
  explicit ContextScope(const Context& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

// Like ContextScope, and also prevents stream captures from forbidding the thread's driver calls.
// Also throws kDriverFailed if the driver refuses this three times: a waiting call would then break
// a capture, so the caller must not make it.
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
