// deferred_release: the owner of a driver object, and the list of objects that the driver refused
// to release.
//
// A DriverObject destroys its object with the one driver call for the object's type. If the driver
// refuses the call, the object moves to the process's list of deferred releases, with a warning
// (log.h). Every transition, every allocation and trim() call retry_releases(), which makes the
// same call again. An allocation repeats only calls that do not wait. Room in the list is reserved
// before the object is created, so the destructor needs no host memory.
//
// Streams, events and modules are not deferred. These objects belong to a context, which a program
// may reset before a later attempt, and destroying an object of a reset context crashes the driver.
// The destroy call is repeated once immediately; if it fails again, the object is leaked, with a
// warning.
//
// When the driver shuts down with the process, every object is considered released.
//
// An object may be used on any thread, but by only one thread at a time. The list has its own
// mutex, which is locked during retried calls that do not wait. Therefore, when retry_releases()
// returns, no other thread is in the middle of such a call.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/driver/context.h"
#include "core/platform/host_budget.h"

namespace memsaver {

// Describes how objects of one kind are destroyed. All instances are constants.
struct ObjectKind {
  enum class Memory { kNone, kDevice, kHost };
  enum class Scope { kNone, kContext, kDevice };

  const char* call;    // the driver call that destroys an object
  const char* memory;  // the memory that stays allocated, for the warning; null: not deferred
  Memory counts_as;    // in the statistics of deferred releases
  Scope scope;         // the scope in which the call must be made
  bool waits;          // the call waits for work on the device
  CUresult (*destroy)(uint64_t object, uint64_t bytes);
};

class DriverObject {
 public:
  DriverObject() noexcept = default;
  // Reserves room in the list of deferred releases. The object owns nothing until own() is called.
  // Throws std::bad_alloc.
  explicit DriverObject(const ObjectKind& kind) : DriverObject(kind, nullptr) {}
  DriverObject(const ObjectKind& kind, const Context& context) : DriverObject(kind, &context) {}
  DriverObject(DriverObject&& other) noexcept;
  DriverObject& operator=(DriverObject&& other) noexcept;
  ~DriverObject();

  // Takes ownership of a newly created object. `claim` is released after the object.
  void own(uint64_t object, uint64_t bytes = 0, HostClaim claim = {}) noexcept;
  // Changes the kind of the object, which determines its destroy call, to another deferred kind.
  void change_kind(const ObjectKind& kind, HostClaim claim) noexcept;

  explicit operator bool() const { return parts_.object != 0; }
  // Returns whether room in the list is reserved. The result is false for a default-constructed
  // object and after a deferred release.
  bool has_room() const { return parts_.kind != nullptr; }
  uint64_t get() const { return parts_.object; }
  uint64_t bytes() const { return parts_.bytes; }
  const Context* context() const { return parts_.context; }

  // Destroys the object. If this function throws kDriverFailed, the object is still owned.
  void destroy();
  // Destroys the object as the destructor does. Returns false if the driver refused the call.
  bool release() noexcept;
  // Moves the object to the list of deferred releases, without a driver call or a warning. Called
  // after destroy() has thrown, so the caller's error reports the failure. May be called only for
  // kinds that are deferred.
  void defer() noexcept;

  // Removes a deferred object of the given kind and at least `bytes` bytes from the list and
  // returns it for reuse. Returns an empty object if the list contains no such object.
  static DriverObject take_deferred(const ObjectKind& kind, uint64_t bytes) noexcept;

  // The arguments of a destroy call.
  struct Parts {
    CUresult destroy() const;  // throws kDriverFailed if the scope cannot be entered

    const ObjectKind* kind = nullptr;
    const Context* context = nullptr;
    uint64_t object = 0, bytes = 0;
    HostClaim claim;
  };

 private:
  DriverObject(const ObjectKind& kind, const Context* context);

  Parts parts_;
};

// Deferred releases: the number of objects and their memory, in bytes. `device_bytes` is an upper
// bound: if the driver refuses both to unmap and to release a piece of memory, its bytes are
// counted twice.
struct Deferred {
  uint64_t objects = 0, device_bytes = 0, host_bytes = 0;
};

// Returns the current deferred releases. Any thread.
Deferred deferred_releases() noexcept;

enum class Retry { kWithoutWaiting, kAll };

// Retries the refused calls, oldest first, and returns the amounts released. With kAll, waits for
// work on the devices. Any thread may call this function, inside or outside a DeviceScope, but not
// under the registry's lock.
Deferred retry_releases(Retry which) noexcept;

}  // namespace memsaver
