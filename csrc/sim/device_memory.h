// Physical memory of one simulated device.
//
// Each device has one memfd. Exportable memory has its own file, which other processes can map and
// whose last page states the device and the size. In the device's file, every allocation gets a
// file offset that was never used before (the file is sparse and 2^62 bytes long). Therefore, new
// memory reads as zero, the file does not fragment, and consecutive allocations are adjacent in the
// file. Released memory is punched out of the file and returned to the operating system
// immediately.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace memsaver::sim {

// The unit of physical memory and of reserved addresses. The unit is the same as on GPUs unless
// sim_granularity() has set another, and it is constant after cuInit.
constexpr uint64_t kGranularity = 2ull << 20;
uint64_t granularity();
// Sets the unit. Must be called before cuInit, with State::mutex (state.h) locked. Returns false if
// `bytes` is not a power of two from the system's page size to kGranularity.
bool set_granularity(uint64_t bytes);

class DeviceMemory;

// Owns one piece of a device's memory, which is released when the last owner is destroyed.
// Immutable. The last owner may be destroyed on any thread, with or without the lock.
class PhysicalMemory {
 public:
  // `own_file` is the memory's own file, or -1 for a part of the device's file. `counted` is false
  // for memory of another process, because that process counts the memory.
  PhysicalMemory(DeviceMemory* device, uint64_t offset, uint64_t size, uint64_t id,
                 const CUmemAllocationProp& properties, int own_file = -1, bool counted = true);
  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  int fd() const;
  int ordinal() const;
  bool exportable() const { return own_file_ >= 0; }
  uint64_t offset() const { return offset_; }
  uint64_t size() const { return size_; }
  // Returns the memory's handle value, which is unique in a process.
  uint64_t id() const { return id_; }
  const CUmemAllocationProp& properties() const { return properties_; }

 private:
  DeviceMemory* const device_;
  const uint64_t offset_;
  const uint64_t size_;
  const uint64_t id_;
  const CUmemAllocationProp properties_;
  const int own_file_;
  const bool counted_;
};

// The capacity and the accounting of a device. The caller of create(), occupy() and free_bytes()
// must own State::mutex (state.h); the other functions need no lock.
class DeviceMemory {
 public:
  DeviceMemory(int ordinal, uint64_t capacity_bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Creates the backing file. Returns false if a system call fails.
  bool open();
  // Allocates `size` bytes, a multiple of granularity(). Returns null if not enough memory is free.
  std::shared_ptr<PhysicalMemory> create(uint64_t size, uint64_t id,
                                         const CUmemAllocationProp& properties);
  // Returns the memory of a descriptor that a process exported from the device with the same
  // ordinal. The caller keeps ownership of the descriptor. Returns null for any other descriptor,
  // or if a system call fails.
  std::shared_ptr<PhysicalMemory> import_file(int descriptor, uint64_t id);
  // Returns the ordinal of the device to whose memory the descriptor refers, or -1.
  static int ordinal_of(int descriptor);
  // Sets the number of bytes used by other processes.
  void occupy(uint64_t bytes) { occupied_ = bytes; }

  int fd() const { return fd_; }
  int ordinal() const { return ordinal_; }
  uint64_t capacity_bytes() const { return capacity_; }
  uint64_t used_bytes() const { return used_.load(); }
  uint64_t free_bytes() const;

 private:
  friend class PhysicalMemory;
  void release(const PhysicalMemory& memory);

  const int ordinal_;
  const uint64_t capacity_;
  int fd_ = -1;
  uint64_t next_offset_ = 0;
  uint64_t occupied_ = 0;
  std::atomic<uint64_t> used_{0};
};

}  // namespace memsaver::sim
