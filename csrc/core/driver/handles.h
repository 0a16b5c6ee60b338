// handles: owner classes for driver objects; the call that destroys each kind of object is written
// once.
//
// All classes are move-only; a default-constructed or moved-from object owns nothing. Factories
// make the driver call and throw if the call fails. Destructors destroy the driver object as
// DriverObject does (deferred_release.h). The driver's virtual-memory calls need no current
// context, and are legal during stream capture. An object may be used on any thread, but by only
// one thread at a time.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/driver/deferred_release.h"
#include "core/driver/device.h"
#include "core/platform/descriptor.h"
#include "core/platform/range.h"

namespace memsaver {

// Physical device memory, independent of the address at which a Mapping may map it. New memory
// reads as zero, because the driver clears it. Memory that several processes share is released when
// the last of these processes releases it.
class PhysicalMemory {
 public:
  // `bytes` must be a multiple of the device's granularity. Other processes can import the memory
  // only if `exportable` is true. Throws kOutOfDeviceMemory, kDriverFailed.
  static PhysicalMemory create(const Device& device, uint64_t bytes, bool exportable = false);
  // Imports the memory of a descriptor that another process exported. `bytes` must be the full
  // size of the memory. The caller keeps ownership of the descriptor and may close it after the
  // call. Throws kDriverFailed.
  static PhysicalMemory import_from(int descriptor, uint64_t bytes);

  PhysicalMemory() = default;

  uint64_t bytes() const { return object_.bytes(); }
  CUmemGenericAllocationHandle handle() const { return object_.get(); }
  // The number under which the memory is exported, unique in this process; 0 if the memory is not
  // exportable.
  uint64_t export_id() const { return export_id_; }
  // Assigns a new export number to exportable memory. Does nothing for other memory.
  void renew_export_id() noexcept;
  // Exports the memory. The returned descriptor keeps the memory allocated. Throws kDriverFailed,
  // kOutOfHostMemory.
  Descriptor export_memory() const;

 private:
  friend class Mapping;
  PhysicalMemory(DriverObject&& object, DriverObject&& mapped, uint64_t export_id)
      : object_(std::move(object)), mapped_(std::move(mapped)), export_id_(export_id) {}

  DriverObject object_;
  // The range at which a Mapping maps the memory. It is a member of this class so that mapping
  // needs no host memory, and it follows `object_` so that the range is unmapped before the memory
  // is released.
  DriverObject mapped_;
  uint64_t export_id_ = 0;
};

// A reserved range of addresses without memory.
class VaReservation {
 public:
  // Reserves a range that is aligned to `alignment` (a power of two). If the driver refuses the
  // alignment, reserves a larger range that contains an aligned part of `bytes` bytes. Throws
  // kDriverFailed, kOutOfDeviceMemory.
  static VaReservation reserve(uint64_t bytes, uint64_t alignment);

  VaReservation() = default;

  uint64_t address() const { return address_; }  // the address of the aligned part
  uint64_t bytes() const { return bytes_; }

 private:
  VaReservation(DriverObject&& whole, uint64_t address, uint64_t bytes)
      : whole_(std::move(whole)), address_(address), bytes_(bytes) {}

  DriverObject whole_;
  uint64_t address_ = 0, bytes_ = 0;
};

// Physical memory mapped at an address, readable and writable by the devices that `access` names.
// The caller must drain the device before it destroys a Mapping.
class Mapping {
 public:
  // Takes ownership of the memory, unless the function throws. The range must be inside a live
  // VaReservation and contain no other mapping. `access` is a result of Device::access(), which may
  // be used for many mappings. Needs no host memory, unless an earlier map() of this memory failed
  // and the driver refused to undo that mapping. Throws kDriverFailed, kOutOfDeviceMemory.
  static Mapping map(uint64_t address, PhysicalMemory&& memory,
                     const std::vector<CUmemAccessDesc>& access);
  // The two halves of map(), for several mappings at adjacent addresses: place() maps memory
  // without device access, and allow() sets the access for all mappings in a range. Both throw the
  // same errors as map().
  static Mapping place(uint64_t address, PhysicalMemory&& memory);
  static void allow(const Range& range, const std::vector<CUmemAccessDesc>& access);

  Mapping() = default;

  // Allows more devices to access the memory; the access of devices not in `access` is unchanged.
  // Throws kDriverFailed.
  void share(const std::vector<CUmemAccessDesc>& access) const;

  uint64_t address() const { return memory_.mapped_.get(); }
  uint64_t bytes() const { return memory_.bytes(); }
  uint64_t end() const { return address() + bytes(); }
  const PhysicalMemory& memory() const { return memory_; }
  // Renews the export number. Called when the memory is mapped again or is mapped for another tag.
  void renew_export_id() noexcept { memory_.renew_export_id(); }

  // Unmaps the memory and returns it with its contents. The caller must have drained the device. If
  // this function throws kDriverFailed, the mapping is unchanged.
  PhysicalMemory unmap();

 private:
  explicit Mapping(PhysicalMemory&& memory) : memory_(std::move(memory)) {}

  PhysicalMemory memory_;  // and the range
};

// A memsaver stream on a device, non-blocking and in order. Queued work completes even if the
// Stream object is destroyed.
class Stream {
 public:
  static Stream create(const Device& device);  // throws kDriverFailed

  Stream() = default;

  CUstream get() const { return reinterpret_cast<CUstream>(object_.get()); }

 private:
  DriverObject object_;
};

// A point in a stream that the host or another stream can wait for. Does not record times.
class Event {
 public:
  static Event create(const Device& device);  // throws kDriverFailed

  Event() = default;

  // Call the next two functions inside a DeviceScope. Both throw kDriverFailed.
  void record(CUstream stream);  // at the stream's current end
  void wait() const;             // on the host
  const Context* context() const { return object_.context(); }
  CUevent get() const { return reinterpret_cast<CUevent>(object_.get()); }

 private:
  DriverObject object_;
};

// Device code that is loaded into a device's context.
class Module {
 public:
  // `image` is a fatbin, a cubin or PTX. Throws kDriverFailed, kOutOfDeviceMemory.
  static Module load(const Device& device, const void* image);

  Module() = default;

  CUmodule get() const { return reinterpret_cast<CUmodule>(object_.get()); }

 private:
  DriverObject object_;
};

}  // namespace memsaver
