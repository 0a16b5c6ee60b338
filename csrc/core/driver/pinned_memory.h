// pinned_memory: host pages that every device can copy from and to at full speed.
//
// Pages that are still pinned must not be allocated for anything else. If the driver refuses to
// unpin pages of a PinnedMemory, these pages stay mapped, pinned and claimed until a retry succeeds
// (deferred_release.h).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/driver/context.h"
#include "core/driver/deferred_release.h"
#include "core/platform/host_budget.h"

namespace memsaver {

// Move-only; a default-constructed object owns nothing. Only one thread at a time may use an
// object. Unpinning waits for work on the device that pinned the pages.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  // Creates an empty object for pin(). Throws std::bad_alloc.
  explicit PinnedMemory(const Context& context);

  // Maps and pins the claimed number of bytes in new pages, which forked children do not inherit.
  // With the default flags, reuses pages whose release was deferred (possibly more than claimed),
  // so that memory use does not grow with every call while the driver refuses to unpin pages.
  // `flags` contains flags of cuMemHostRegister; `purpose` appears in error messages. Call inside a
  // DeviceScope. Throws kOutOfHostMemory.
  static PinnedMemory allocate(const Context& context, HostClaim claim, const char* purpose,
                               unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE);

  // Pins whole pages that the caller owns. The caller must call unpin() or adopt() before releasing
  // the pages. Call inside a DeviceScope. Throws kOutOfHostMemory.
  void pin(void* start, uint64_t bytes, unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE);
  // Unpins the caller's pages. If this function throws kDriverFailed, the pages stay pinned.
  void unpin() { object_.destroy(); }
  // Takes ownership of the caller's pages and their claim; the pages are unmapped after a retry
  // unpins them.
  void adopt(HostClaim claim) noexcept;
  // Releases the memory as the destructor does. Returns false if the release is deferred.
  bool release() noexcept { return object_.release(); }

  char* data() const { return reinterpret_cast<char*>(object_.get()); }
  uint64_t bytes() const { return object_.bytes(); }

 private:
  explicit PinnedMemory(DriverObject&& object) : object_(std::move(object)) {}

  DriverObject object_;
};

}  // namespace memsaver
