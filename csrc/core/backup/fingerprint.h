// fingerprint: computes 256-bit fingerprints of device memory on the device, without allocating
// device memory.
//
// Two pieces with the same bytes have the same fingerprint, in every process and at every address.
// See kernels/fingerprint_hash.h for the collision probability.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/driver/device.h"
#include "core/driver/handles.h"
#include "core/platform/range.h"
#include "kernels/fingerprint_host.h"  // Digest, kFingerprintBytes, fingerprint_of

namespace memsaver {

// One fingerprint job on one device. A single thread uses the object, inside a DeviceScope of the
// device, from construction to destruction. May be used inside a stream capture.
class Fingerprinter {
 public:
  // Returns false if the kernel cannot be loaded, either permanently (no image matches the GPU or
  // driver) or temporarily (for example, because memory is exhausted). The caller then works
  // without fingerprints. The first failure on each device adds a warning. The kernel is loaded
  // once per device. Any thread may call this function, inside or outside a DeviceScope.
  static bool available(Device& device) noexcept;

  // If the kernel cannot be loaded, throws kDriverFailed or kOutOfDeviceMemory.
  explicit Fingerprinter(Device& device);
  ~Fingerprinter();  // waits for queued work
  Fingerprinter(const Fingerprinter&) = delete;
  Fingerprinter& operator=(const Fingerprinter&) = delete;

  // Queues the computation for all of `pieces` on a separate stream. No piece may be larger than
  // kFingerprintBytes. Does not wait for other work: the caller must have drained the device.
  // Called once per object. The pieces must stay mapped and unchanged until their fingerprints are
  // computed or the object is destroyed. Throws kDriverFailed, kOutOfHostMemory.
  void start(const std::vector<Range>& pieces);

  // Waits for the batch of kBatchPieces pieces that contains pieces[piece], and returns the piece's
  // fingerprint. The reference is valid for the object's lifetime. Throws kDriverFailed.
  const Digest& wait(size_t piece);

  static constexpr size_t kBatchPieces = 1024;

  // Releases the host memory that is kept for the next job on every device, and returns the number
  // of released bytes. Any thread.
  static uint64_t trim() noexcept;

  // Kept is the process's state for each device; Exchange is a job's host memory (see
  // fingerprint.cpp).
  struct Kept;
  class Exchange;

 private:
  Device& device_;
  CUfunction kernel_;
  Stream stream_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<Event> batches_;  // the end of each batch
  size_t done_ = 0;             // the number of batches that are done
};

}  // namespace memsaver
