// device: one GPU of this process: its primary context, its limits, its copy stream, and how to
// wait for it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace memsaver {

// Lives as long as the process; the primary context stays retained, because memory of ours may be
// freed at any time. Any thread.
class Device {
 public:
  // The device of an ordinal; starts its primary context at the first use. Throws kInvalidArgument
  // for an ordinal that does not exist, kNotLoaded for a device without virtual memory management,
  // kDriverFailed.
  static Device& get(int ordinal);

  // The ordinal that the calling thread's context belongs to; 0 where the thread has none, as the
  // runtime would.
  static int current();

  static int count();

  // The devices whose primary context is active, one bit each. Throws kDriverFailed: one that
  // cannot be asked about may have work in flight.
  static uint64_t active();

  int ordinal() const { return ordinal_; }
  CUcontext context() const { return context_; }

  // The least size and alignment of physical memory, bytes (2 MiB on every GPU seen).
  uint64_t granularity() const { return granularity_; }

  // Makes the primary context the calling thread's where it has none, as cudaMalloc does.
  void adopt_thread() const noexcept;

  // Free and total bytes as the driver counts them.
  struct Memory {
    uint64_t free_bytes, total_bytes;
  };
  Memory memory() const;

  // Who takes memory only where some would stay free holds this from the look to the last piece, so
  // that the next one sees what was taken.
  std::unique_lock<std::mutex> lock_room() { return std::unique_lock<std::mutex>(room_mutex_); }

  // All of its memory, bytes.
  uint64_t total_bytes() const { return total_bytes_; }

  // True where network cards may read memory of cuMemCreate directly.
  bool rdma_supported() const { return rdma_supported_; }

  // Who may touch this device's memory, as cuMemSetAccess takes it: itself, and those peers whose
  // context is active. Throws kDriverFailed.
  std::vector<CUmemAccessDesc> access() const;

  // The streams of our copies (non-blocking, in order), one for each direction, made at the first
  // use.
  enum class Direction { kToHost, kToDevice };
  CUstream copy_stream(Direction direction);

  // The NUMA node of the host that is nearest, or -1 where there is one node only.
  int numa_node() const { return numa_node_; }
  // As the system and NVML write it; "" where the driver does not say.
  const std::string& bus_id() const { return bus_id_; }

  // Returns when all work submitted to the device before the call is done, on every stream:
  // cuMemUnmap does not wait for it. Legal inside a stream capture. Throws kDriverFailed for an
  // earlier error of the device.
  void drain();

  // The same for every device in use: kernels of one may touch memory of another. Throws as both.
  static void drain_active();

 private:
  explicit Device(int ordinal);
  CUdeviceptr take_wait_block();

  const int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  uint64_t granularity_ = 0;
  uint64_t total_bytes_ = 0;
  bool rdma_supported_ = false;
  int numa_node_ = -1;
  std::string bus_id_;
  std::mutex mutex_;  // over the two below
  CUstream copy_streams_[2] = {};
  std::vector<CUdeviceptr> unfreed_;  // of drain(), whose freeing failed
  // A small block, so that the driver keeps the slab from which drain() takes another.
  CUdeviceptr keeper_ = 0;
  static constexpr size_t kPageBytes = 4096;
  std::mutex page_mutex_;        // over the two below
  bool page_is_pinned_ = false;  // also after an unpinning that failed
  alignas(kPageBytes) char page_[kPageBytes];
  std::mutex room_mutex_;
};

// While it lives, the thread's context is the device's. Restores it; an error of restoring is
// dropped. Throws kDriverFailed. Enough for calls that are legal under any stream capture.
class ContextScope {
 public:
  explicit ContextScope(const Device& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

// The same, and driver calls of the thread are none that a stream capture forbids. Throws
// kDriverFailed too where the driver refuses that three times: a call that waits would break a
// capture then, so it must not be made.
class DeviceScope {
 public:
  explicit DeviceScope(const Device& device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  ContextScope context_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace memsaver
