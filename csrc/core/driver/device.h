// device: a GPU of this process, with its primary context, its limits, its copy streams, and
// functions that wait for work on the device.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/driver/context.h"
#include "core/driver/pinned_memory.h"

namespace memsaver {

// A Device lives as long as the process. The primary context stays retained, because memsaver's
// memory may be freed at any time. Any thread.
class Device : public Context {
 public:
  // Returns the device with this ordinal, and starts the device's primary context on first use.
  // Throws kInvalidArgument if no device has this ordinal, kNotLoaded if the device lacks virtual
  // memory management, and kDriverFailed.
  static Device& get(int ordinal);

  // Returns the ordinal of the device whose context is current on the calling thread, or 0 if the
  // thread has no context, as the CUDA runtime does.
  static int current();

  static int count();

  // Returns whether device `from` can access the memory of device `to`. Creates no context. Throws
  // kDriverFailed.
  static bool can_access(int from, int to);

  // Returns a bit mask of the devices whose primary context is active. Throws kDriverFailed if a
  // device cannot be queried, because such a device may have work in flight.
  static uint64_t active();

  int ordinal() const { return ordinal_; }

  // The smallest size and alignment of physical memory, in bytes (2 MiB on all tested GPUs).
  uint64_t granularity() const { return granularity_; }

  // If the calling thread has no context, makes the primary context current, as cudaMalloc does.
  void adopt_thread() const noexcept;

  // The free and total bytes, as reported by the driver.
  struct Memory {
    uint64_t free_bytes, total_bytes;
  };
  Memory memory() const;

  // Returns a device's free bytes. Retains the device's primary context only for the query, because
  // an active context uses device memory. Throws kDriverFailed.
  static uint64_t probe_free_bytes(int ordinal);

  // Excludes other threads whose allocations must leave a margin of free memory. A thread owns this
  // lock from its check to its last allocation, so that the next thread's check includes the
  // allocated memory.
  std::unique_lock<std::mutex> lock_room() { return std::unique_lock<std::mutex>(room_mutex_); }

  // Total memory, in bytes.
  uint64_t total_bytes() const { return total_bytes_; }

  // True if network cards can directly read memory that cuMemCreate allocates.
  bool rdma_supported() const { return rdma_supported_; }

  // Returns the access rights to this device's memory, for cuMemSetAccess: rights for the device
  // itself and for the peers whose context is active. Throws kDriverFailed.
  std::vector<CUmemAccessDesc> access() const;

  // Returns the stream for memsaver's copies in one direction. The streams are non-blocking and in
  // order, and are created on first use.
  enum class Direction { kToHost, kToDevice };
  CUstream copy_stream(Direction direction);

  // The host's nearest NUMA node, or -1 if the host has only one node.
  int numa_node() const { return numa_node_; }
  // The PCI bus id in the format that the system and NVML use, or "" if the driver does not report
  // it.
  const std::string& bus_id() const { return bus_id_; }

  // Waits for all work that was submitted to any stream of the device before the call. Callers must
  // drain the device before cuMemUnmap, which does not wait. May be called inside a stream capture.
  // Throws kDriverFailed if the device had an earlier error.
  void drain();

  // Like drain(), but for every device in use, because kernels on one device may access memory of
  // another device. Throws the same errors as active() and drain().
  static void drain_active();

 private:
  explicit Device(int ordinal);
  DriverObject allocate_wait_block();

  const int ordinal_;
  CUdevice device_ = 0;
  uint64_t granularity_ = 0;
  uint64_t total_bytes_ = 0;
  bool rdma_supported_ = false;
  int numa_node_ = -1;
  std::string bus_id_;
  std::mutex mutex_;  // guards the streams
  CUstream copy_streams_[2] = {};
  // A small block, which makes the driver keep the slab from which drain() allocates another block.
  CUdeviceptr keeper_ = 0;
  static constexpr size_t kPageBytes = 4096;
  std::mutex page_mutex_;  // guards the two fields below
  // Pins page_, which stays pinned until the next drain() if drain() could not unpin it.
  PinnedMemory pinned_page_{*this};
  alignas(kPageBytes) char page_[kPageBytes];
  std::mutex room_mutex_;
};

}  // namespace memsaver
