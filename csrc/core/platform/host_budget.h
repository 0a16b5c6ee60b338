// host_budget: limits the host memory that backups use.
//
// Memory is claimed before it is touched. A backup that does not fit therefore fails with an error
// before the system's OOM killer would kill the process. The budget is per process: the memory of
// other processes reduces the budget only after that memory has been allocated.
//
// Any thread may make a claim, but not under the registry's lock, because a claim reads files,
// which takes a few hundred microseconds.
#pragma once

#include <cstdint>
#include <string>

namespace memsaver {

// Returns the host memory that the system can still provide to this process, in bytes. This is the
// minimum of MemAvailable and, for each control group of the process, the remaining memory below
// the group's limit (memory.max and memory.high, or memory.limit_in_bytes). The page cache counts
// as free memory, because the system reclaims it first. Memory that is claimed but not yet touched
// is subtracted. Another 2% of the total or limit, but at least 256 MiB, is subtracted for overhead
// (page tables 0.2%, the driver's records of pinned pages about 1%) and for other processes'
// allocations. Returns UINT64_MAX if the system reports no values.
uint64_t host_available_bytes();

// The purpose of claimed memory, for error messages and their advice.
enum class HostUse { kBackup, kStaging };

// A claim on bytes of the budget; the destructor returns the bytes. Movable. Only one thread at a
// time may use a claim, except that several threads may call touched() at the same time.
class HostClaim {
 public:
  // Claims nothing.
  HostClaim() noexcept = default;

  // Claims `bytes` bytes. Errors: kOutOfHostMemory if host_available_bytes() is less than `bytes`
  // or if all claims together would exceed option host_bytes; no bytes are claimed. In this error,
  // needed_bytes is `bytes`, and free_bytes is the available memory. kBadConfig if the option is
  // invalid.
  static HostClaim take(uint64_t bytes, HostUse use);

  // Records `bytes` bytes to which the limits do not apply: the small amount that a transition
  // itself needs. held() includes these bytes; claimed() does not.
  static HostClaim outside_budget(uint64_t bytes) noexcept;

  HostClaim(HostClaim&& other) noexcept;
  HostClaim& operator=(HostClaim&& other) noexcept;
  ~HostClaim();

  // Claims `bytes` additional bytes. Throws the same errors as take(), without changing the claim.
  void grow(uint64_t bytes, HostUse use);

  // Records that `bytes` bytes of the claim are now allocated memory of this process, so the
  // system's available memory no longer includes them. Call this function after touching the
  // memory. `bytes` must not exceed the untouched bytes.
  void touched(uint64_t bytes) noexcept;

  // Returns `bytes` bytes to the budget, starting with touched bytes. The memory of these bytes
  // must already be released to the system. `bytes` must not exceed the claimed bytes.
  void shrink(uint64_t bytes) noexcept;

  // Returns to the budget `bytes` bytes that were claimed but never touched. `bytes` must not
  // exceed the untouched bytes.
  void shrink_untouched(uint64_t bytes) noexcept;

  // Moves `bytes` bytes, starting with touched bytes, from this claim to the returned claim.
  // `bytes` must not exceed the claimed bytes.
  HostClaim split(uint64_t bytes) noexcept;

  uint64_t bytes() const { return bytes_; }
  uint64_t touched_bytes() const { return touched_bytes_; }

  // Return the total bytes of all claims in the process; each call costs a load.
  static uint64_t claimed() noexcept;
  static uint64_t held() noexcept;

 private:
  void release(uint64_t of_touched, uint64_t of_untouched) noexcept;

  uint64_t bytes_ = 0;
  uint64_t touched_bytes_ = 0;  // of bytes_
  bool in_budget_ = true;
};

}  // namespace memsaver
