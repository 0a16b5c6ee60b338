// host_budget: how much host memory backups may take.
//
// Memory is claimed before it is touched, so that a backup which does not fit is an error and not
// the end of the process by the system's OOM killer. The budget is the process's own: other
// processes are seen only by the memory that they have taken.
//
// Any thread. A claim reads files (some hundred microseconds): not under the registry lock.
#pragma once

#include <cstdint>
#include <string>

namespace memsaver {

// Host memory that the system can still give this process, in bytes: the least of MemAvailable and
// of what each control group of the process leaves up to its limit (memory.max and memory.high, or
// memory.limit_in_bytes), where page cache counts as free, because the system reclaims it before it
// kills. Less 2 % of the total or limit, and 256 MiB at least, for what comes with the memory (page
// tables 0.2 %, the driver's records of pinned pages about 1 %) and for what others take meanwhile;
// and less what is claimed and not yet touched. UINT64_MAX when the system says nothing.
uint64_t host_available_bytes();

// Bytes claimed from the budget, given back by the destructor. Movable. One thread at a time may
// use one claim, but that several may call touched() at once.
class HostClaim {
 public:
  // Claims nothing.
  HostClaim() noexcept = default;

  // Claims `bytes` for `what`, such as "the backup of tag 'weights'", for the message. Throws
  // kOutOfHostMemory, having claimed nothing, when host_available_bytes() are fewer, or when with
  // all other claims they would exceed the option host_bytes; needed_bytes are `bytes`, free_bytes
  // what could be had. kBadConfig: the option cannot be understood.
  static HostClaim take(uint64_t bytes, const std::string& what);

  HostClaim(HostClaim&& other) noexcept;
  HostClaim& operator=(HostClaim&& other) noexcept;
  ~HostClaim();

  // Claims so many more. Throws as take does; the claim is then as it was.
  void grow(uint64_t bytes, const std::string& what);

  // Says that so many more of the claimed bytes are now memory that this process has, so that they
  // are missing from what the system has available. Called after they were touched. At most what is
  // claimed.
  void touched(uint64_t bytes) noexcept;

  // Gives back so many bytes, touched ones first: their memory must have gone back to the system
  // before. At most what is claimed.
  void shrink(uint64_t bytes) noexcept;

  // Gives back so many bytes that were claimed and never touched. At most those.
  void shrink_untouched(uint64_t bytes) noexcept;

  uint64_t bytes() const { return bytes_; }
  uint64_t touched_bytes() const { return touched_bytes_; }

  // The bytes of all claims of the process. A load.
  static uint64_t claimed() noexcept;

 private:
  void give_back(uint64_t of_touched, uint64_t of_untouched) noexcept;

  uint64_t bytes_ = 0;
  uint64_t touched_bytes_ = 0;  // of bytes_
};

}  // namespace memsaver
