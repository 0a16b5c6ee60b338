// fingerprint: 256-bit fingerprints of device memory, found on the device without memory there.
//
// Two pieces with the same bytes have the same fingerprint, in every process and at every address.
// What else equal fingerprints say: kernels/fingerprint_hash.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/device.h"
#include "core/handles.h"
#include "core/range.h"
#include "kernels/fingerprint_host.h"  // Digest, kFingerprintBytes, fingerprint_of

namespace memsaver {

// One job on one device, of one thread, which is inside a DeviceScope of the device from before the
// construction until after the destruction. Legal inside a stream capture.
class Fingerprinter {
 public:
  // False where the kernel cannot be loaded, because it fits neither the GPU nor the driver, or
  // this time for want of something: callers do without fingerprints. A warning tells the first
  // time. Loading happens once for a device, and is kept. Any thread, in a DeviceScope or not.
  static bool available(Device& device) noexcept;

  // Throws why it is not available: kDriverFailed, kOutOfDeviceMemory.
  explicit Fingerprinter(Device& device);
  ~Fingerprinter();  // waits for what is queued
  Fingerprinter(const Fingerprinter&) = delete;
  Fingerprinter& operator=(const Fingerprinter&) = delete;

  // Queues all of `pieces`, none of them larger than kFingerprintBytes, on a stream of its own, and
  // waits for nothing: the caller has drained the device. Once in the object's life. They must be
  // mapped and stay as they are until they are done, or the object is gone. Throws kDriverFailed,
  // kOutOfHostMemory.
  void start(const std::vector<Range>& pieces);

  // The fingerprint of pieces[piece], when the batch of kBatchPieces that it belongs to is done.
  // Valid as long as the object. Throws kDriverFailed.
  const Digest& wait(size_t piece);

  static constexpr size_t kBatchPieces = 1024;

  // Host memory held by jobs and for the next ones, bytes: 48 for each piece. Any thread.
  static uint64_t held_bytes() noexcept;
  // Gives up what is kept for the next job, on every device; the bytes.
  static uint64_t trim() noexcept;

  // What a device keeps, and the host memory of a job: fingerprint.cpp's.
  struct Kept;
  class Exchange;

 private:
  Device& device_;
  CUfunction kernel_;
  Stream stream_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<Event> batches_;  // of each, its end
  size_t done_ = 0;             // of the batches, from the first
};

}  // namespace memsaver
