// device: one GPU of this process: its primary context, limits and copy streams, and waiting for
// its work.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/driver/context.h"
#include "core/driver/pinned_memory.h"

namespace memsaver {

// Lives as long as the process. The primary context stays retained, because memsaver's memory may
// be freed at any time. Any thread.
class Device : public Context {
 public:
  // Returns the device with an ordinal, and starts its primary context on first use. Throws
  // kInvalidArgument for an ordinal that does not exist, kNotLoaded for a device without virtual
  // memory management, kDriverFailed.
  static Device& get(int ordinal);

  // Returns the ordinal of the device of the calling thread's context, or 0 if the thread has no
  // context, as the CUDA runtime does.
  static int current();

  static int count();

  // Returns whether device `from` can access the memory of device `to`. Creates no context. Throws
  // kDriverFailed.
  static bool can_access(int from, int to);

  // Returns a bit mask of the devices whose primary context is active. Throws kDriverFailed if a
  // device cannot be queried, rather than omit one that may have work in flight.
  static uint64_t active();

  int ordinal() const { return ordinal_; }

  // The smallest size and alignment of physical memory, in bytes (2 MiB on all tested GPUs).
  uint64_t granularity() const { return granularity_; }

  // If the calling thread has no context, makes the primary context current, as cudaMalloc does.
  void adopt_thread() const noexcept;

  // Free and total bytes, as reported by the driver.
  struct Memory {
    uint64_t free_bytes, total_bytes;
  };
  Memory memory() const;

  // Returns a device's free bytes. Retains the device's primary context only for the query, because
  // an active context uses device memory. Throws kDriverFailed.
  static uint64_t probe_free_bytes(int ordinal);

  // Locks out other threads that must leave a margin free, from a thread's check to its last
  // allocation, so that the next thread's check sees the allocated memory.
  std::unique_lock<std::mutex> lock_room() { return std::unique_lock<std::mutex>(room_mutex_); }

  // Total memory, in bytes.
  uint64_t total_bytes() const { return total_bytes_; }

  // True if network cards can directly read memory created by cuMemCreate.
  bool rdma_supported() const { return rdma_supported_; }

  // Returns the access rights to this device's memory, for cuMemSetAccess: the device itself, and
  // the peers whose context is active. Throws kDriverFailed.
  std::vector<CUmemAccessDesc> access() const;

  // The streams for memsaver's copies (non-blocking, in order), one for each direction, created at
  // the first use.
  enum class Direction { kToHost, kToDevice };
  CUstream copy_stream(Direction direction);

  // The nearest NUMA node of the host, or -1 if there is only one.
  int numa_node() const { return numa_node_; }
  // The PCI bus id as the system and NVML write it; "" if the driver does not report it.
  const std::string& bus_id() const { return bus_id_; }

  // Waits until all work submitted to the device before the call is done, on every stream, because
  // cuMemUnmap does not. Legal inside a stream capture. Throws kDriverFailed for an earlier error
  // of the device.
  void drain();

  // Like drain(), for every device in use: kernels of one device may access memory of another.
  // Throws like active() and drain().
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
  // A small block, so that the driver keeps the slab from which drain() allocates another.
  CUdeviceptr keeper_ = 0;
  static constexpr size_t kPageBytes = 4096;
  std::mutex page_mutex_;  // guards the two fields below
  // Pins page_, which stays pinned until the next drain() if drain() could not unpin it.
  PinnedMemory pinned_page_{*this};
  alignas(kPageBytes) char page_[kPageBytes];
  std::mutex room_mutex_;
};

}  // namespace memsaver
