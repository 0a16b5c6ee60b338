// host_budget: limits the host memory of backups.
//
// Memory is claimed before it is touched, so that a backup that does not fit causes an error, and
// the system's OOM killer does not kill the process. The budget is per process: it includes other
// processes' memory only once they have allocated it.
//
// Any thread. A claim reads files (a few hundred microseconds), so it must not be made under the
// registry's lock.
#pragma once

#include <cstdint>
#include <string>

namespace memsaver {

// Returns the host memory that the system can still provide to this process, in bytes: the least of
// MemAvailable and of the memory that each control group of the process leaves up to its limit
// (memory.max and memory.high, or memory.limit_in_bytes). Page cache counts as free, because the
// system reclaims it first. Subtracts 2 % of the total or limit, at least 256 MiB, for overhead
// (page tables 0.2 %, the driver's records of pinned pages about 1 %) and for other processes'
// allocations, and subtracts memory that is claimed but not yet touched. Returns UINT64_MAX if the
// system reports nothing.
uint64_t host_available_bytes();

// Bytes claimed from the budget; the destructor returns them. Movable. One thread at a time may use
// a claim, but several threads may call touched() at once.
class HostClaim {
 public:
  // Claims nothing.
  HostClaim() noexcept = default;

  // Claims `bytes` for `what`, such as "the backup of tag 'weights'", which the message includes.
  // Errors: kOutOfHostMemory, with nothing claimed, if host_available_bytes() is less or all claims
  // would exceed the option host_bytes; needed_bytes is `bytes`, free_bytes the available memory.
  // kBadConfig if the option is invalid.
  static HostClaim take(uint64_t bytes, const std::string& what);

  // Records `bytes` of memory outside the limits: the small amount that a transition itself needs.
  // held() counts it, claimed() does not.
  static HostClaim outside_budget(uint64_t bytes) noexcept;

  HostClaim(HostClaim&& other) noexcept;
  HostClaim& operator=(HostClaim&& other) noexcept;
  ~HostClaim();

  // Claims `bytes` more. Throws like take, without changing the claim.
  void grow(uint64_t bytes, const std::string& what);

  // Records that `bytes` of the claim are now allocated memory of this process, so the system's
  // available memory no longer includes them. Call it after touching them. `bytes` must not
  // exceed the untouched bytes.
  void touched(uint64_t bytes) noexcept;

  // Returns `bytes` to the budget, touched bytes first; their memory must already be released to
  // the system. `bytes` must not exceed the claimed bytes.
  void shrink(uint64_t bytes) noexcept;

  // Returns `bytes` that were claimed and never touched. `bytes` must not exceed the
  // untouched bytes.
  void shrink_untouched(uint64_t bytes) noexcept;

  // Moves `bytes` bytes, touched ones first, from this claim to the returned one. `bytes` must
  // not exceed the claimed bytes.
  HostClaim split(uint64_t bytes) noexcept;

  uint64_t bytes() const { return bytes_; }
  uint64_t touched_bytes() const { return touched_bytes_; }

  // Returns the bytes of all claims of the process. A load.
  static uint64_t claimed() noexcept;
  static uint64_t held() noexcept;

 private:
  void release(uint64_t of_touched, uint64_t of_untouched) noexcept;

  uint64_t bytes_ = 0;
  uint64_t touched_bytes_ = 0;  // of bytes_
  bool in_budget_ = true;
};

}  // namespace memsaver
