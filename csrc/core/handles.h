// handles: one owner for each driver object; the call that undoes is written once, in the owner.
//
// All are move-only; a moved-from or default one owns nothing. Factories make the driver call and
// throw if it failed. Destructors cannot throw: a failure there is a warning (log.h), and what
// still holds device memory goes to the strays, which collect_strays() tries again. The driver's
// virtual-memory calls need no current context and are none that a stream capture forbids; pinning
// needs a DeviceScope of the caller. Any thread, but each object one thread at a time.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/device.h"

namespace memsaver {

// A field of an owner. Moving leaves T{} behind and assigning swaps, so that an owner whose fields
// are all of this kind has the right moves by default.
template <typename T>
class MoveOnly {
 public:
  MoveOnly(T value = T{}) noexcept : value_(value) {}
  MoveOnly(MoveOnly&& other) noexcept : value_(std::exchange(other.value_, T{})) {}
  MoveOnly& operator=(MoveOnly&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }

  operator T() const { return value_; }

 private:
  T value_;
};

// Device memory without an address. Fresh memory reads as zero: the driver clears it.
class PhysicalMemory {
 public:
  // `bytes` must be a multiple of the device's granularity. Throws kOutOfDeviceMemory,
  // kDriverFailed.
  static PhysicalMemory create(const Device& device, uint64_t bytes);

  PhysicalMemory() = default;
  PhysicalMemory(PhysicalMemory&&) noexcept = default;
  PhysicalMemory& operator=(PhysicalMemory&&) noexcept = default;
  ~PhysicalMemory();

  const Device* device() const { return device_; }
  uint64_t bytes() const { return bytes_; }
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  PhysicalMemory(const Device& device, uint64_t bytes, CUmemGenericAllocationHandle handle)
      : device_(&device), bytes_(bytes), handle_(handle) {}

  MoveOnly<const Device*> device_;
  MoveOnly<uint64_t> bytes_;
  MoveOnly<CUmemGenericAllocationHandle> handle_;
};

// A range of addresses without memory.
class VaReservation {
 public:
  // Aligned to `alignment` (a power of two), which drivers may refuse: then more is reserved, so
  // that an aligned part of `bytes` lies in it.
  static VaReservation reserve(uint64_t bytes, uint64_t alignment);

  VaReservation() = default;
  VaReservation(VaReservation&&) noexcept = default;
  VaReservation& operator=(VaReservation&&) noexcept = default;
  ~VaReservation();

  uint64_t address() const { return address_; }  // of the aligned part
  uint64_t bytes() const { return bytes_; }

 private:
  MoveOnly<uint64_t> whole_address_, whole_bytes_;
  MoveOnly<uint64_t> address_, bytes_;
};

// Physical memory at an address, readable and writable for whom `access` names.
class Mapping {
 public:
  // Takes the memory; on a throw it stays with the caller. The range must lie in a live
  // VaReservation and hold no other mapping. `access` is Device::access(), asked once for many
  // mappings.
  static Mapping map(uint64_t address, PhysicalMemory&& memory,
                     const std::vector<CUmemAccessDesc>& access);

  Mapping() = default;
  Mapping(Mapping&&) noexcept = default;
  Mapping& operator=(Mapping&&) noexcept = default;
  ~Mapping();  // unmaps and releases; the caller has drained the device

  // Lets others touch it too. The rights of those not in `access` stay.
  void share(const std::vector<CUmemAccessDesc>& access) const;

  uint64_t address() const { return address_; }
  uint64_t bytes() const { return memory_.bytes(); }
  uint64_t end() const { return address_ + bytes(); }

  // Takes the memory back out, contents and all; on a throw the mapping is as it was. The caller
  // has drained.
  PhysicalMemory unmap();

 private:
  Mapping(uint64_t address, PhysicalMemory&& memory)
      : address_(address), memory_(std::move(memory)) {}

  MoveOnly<uint64_t> address_;
  PhysicalMemory memory_;  // destroyed after the destructor has unmapped it
};

// Host memory that the GPUs can copy from and to at full speed, while somebody else owns the pages.
class PinnedRange {
 public:
  // Page-aligned. `flags` are cuMemHostRegister's. Throws kOutOfHostMemory when the driver or the
  // system refuses to pin it.
  static PinnedRange pin(void* start, uint64_t bytes,
                         unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE);

  PinnedRange() = default;
  PinnedRange(PinnedRange&&) noexcept = default;
  PinnedRange& operator=(PinnedRange&&) noexcept = default;
  ~PinnedRange();

  // Gives up the pinning; on a throw it is as before.
  void unpin();

  uint64_t address() const { return reinterpret_cast<uint64_t>(static_cast<void*>(start_)); }
  uint64_t bytes() const { return bytes_; }

 private:
  MoveOnly<void*> start_;
  MoveOnly<uint64_t> bytes_;
};

// A stream of our own on a device: non-blocking, in order. What is queued runs to its end though
// the owner goes.
class Stream {
 public:
  static Stream create(const Device& device);  // throws kDriverFailed

  Stream() = default;
  Stream(Stream&&) noexcept = default;
  Stream& operator=(Stream&&) noexcept = default;
  ~Stream();

  CUstream get() const { return stream_; }

 private:
  MoveOnly<const Device*> device_;
  MoveOnly<CUstream> stream_;
};

// A place in a stream that can be waited for, by the host or another stream. It keeps no time.
class Event {
 public:
  static Event create(const Device& device);  // throws kDriverFailed

  Event() = default;
  Event(Event&&) noexcept = default;
  Event& operator=(Event&&) noexcept = default;
  ~Event();

  // These two inside a DeviceScope. Throw kDriverFailed.
  void record(CUstream stream);  // here and now
  void wait() const;             // on the host
  const Device* device() const { return device_; }
  CUevent get() const { return event_; }

 private:
  MoveOnly<const Device*> device_;
  MoveOnly<CUevent> event_;
};

// Code in a device's context.
class Module {
 public:
  // `image` is a fatbin, a cubin or PTX. Throws kDriverFailed, kOutOfDeviceMemory.
  static Module load(const Device& device, const void* image);

  Module() = default;
  Module(Module&&) noexcept = default;
  Module& operator=(Module&&) noexcept = default;
  ~Module();

  CUmodule get() const { return module_; }

 private:
  MoveOnly<const Device*> device_;
  MoveOnly<CUmodule> module_;
};

// Tries again to give back what a destructor could not, on one device. Returns the bytes that are
// still held. Called at the start of every transition.
uint64_t collect_strays(const Device& device) noexcept;

}  // namespace memsaver
