#include "core/backup/fingerprint.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include "core/driver/driver.h"
#include "core/driver/kernel_image.h"
#include "core/driver/pinned_memory.h"
#include "core/platform/host_budget.h"
#include "core/platform/log.h"

namespace memsaver {
namespace {

using fingerprint::kPiecesPerBlock;
using fingerprint::kThreads;

static_assert(Fingerprinter::kBatchPieces % kPiecesPerBlock == 0);

// The host memory of a job (48 bytes for each piece, 3 MiB for 64 GiB) is pinned in multiples of
// this size, so that it is large enough for the next job if that job has about as many pieces.
constexpr uint64_t kExchangeUnit = 256 << 10;

// Returns whether a failure means that this GPU or driver will never load the kernel.
bool is_final(int32_t result) {
  switch (result) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_INVALID_SOURCE:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_NOT_SUPPORTED:
      return true;
    default:
      return false;
  }
}

}  // namespace

// The pieces of a job and their fingerprints, in host memory that the device can access, because
// the kernel must work while the device is full.
class Fingerprinter::Exchange {
 public:
  // Allocates room for `pieces` pieces. Call inside a DeviceScope. Throws kOutOfHostMemory,
  // kDriverFailed.
  Exchange(const Device& device, size_t pieces)
      : memory_(PinnedMemory::allocate(
            device, HostClaim::outside_budget(bytes_for(pieces)), "the fingerprints of a pause",
            CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)) {
    CU_CHECK(cuMemHostGetDevicePointer, &device_address_, memory_.data(), 0);
  }

  bool holds(size_t pieces) const { return bytes_for(pieces) <= memory_.bytes(); }
  PinnedMemory& memory() { return memory_; }

  FingerprintPiece& piece(size_t index) const {
    return reinterpret_cast<FingerprintPiece*>(memory_.data())[index];
  }
  const Digest& digest(size_t index) const {
    return reinterpret_cast<const Digest*>(memory_.data() + pieces_bytes())[index];
  }

  // The same pieces and digests, by their device addresses.
  CUdeviceptr device_piece(size_t index) const {
    return device_address_ + index * sizeof(FingerprintPiece);
  }
  CUdeviceptr device_digest(size_t index) const {
    return device_address_ + pieces_bytes() + index * sizeof(Digest);
  }

 private:
  static constexpr uint64_t kPieceBytes = sizeof(FingerprintPiece) + sizeof(Digest);

  static uint64_t bytes_for(size_t pieces) {
    return (pieces * kPieceBytes + kExchangeUnit - 1) / kExchangeUnit * kExchangeUnit;
  }
  uint64_t pieces_bytes() const { return memory_.bytes() / kPieceBytes * sizeof(FingerprintPiece); }

  PinnedMemory memory_;
  CUdeviceptr device_address_ = 0;
};

// The process's state for a device. Never destroyed.
struct Fingerprinter::Kept {
  explicit Kept(Device& device) : device(device) {}

  Device& device;
  std::mutex mutex;  // guards all fields below
  Module module;
  CUfunction kernel = nullptr;
  std::optional<Error> refusal;  // a permanent failure to load
  bool warned = false;
  std::unique_ptr<Exchange> idle;  // kept for the next job
};

namespace {

struct AllKept {
  std::mutex mutex;
  std::map<Device*, std::unique_ptr<Fingerprinter::Kept>> by_device;
};

AllKept& all_kept() {
  static AllKept* const instance = new AllKept;
  return *instance;
}

Fingerprinter::Kept& kept_of(Device& device) {
  AllKept& all = all_kept();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<Fingerprinter::Kept>& kept = all.by_device[&device];
  if (!kept) kept = std::make_unique<Fingerprinter::Kept>(device);
  return *kept;
}

// Returns the kernel, loading it if necessary.
CUfunction load_kernel(Fingerprinter::Kept& kept) {
  std::lock_guard<std::mutex> lock(kept.mutex);
  if (kept.kernel) return kept.kernel;
  if (kept.refusal) throw *kept.refusal;
  try {
    DeviceScope scope(kept.device);
    Module module = Module::load(kept.device, fingerprint_image());
    CUfunction kernel = nullptr;
    CU_CHECK(cuModuleGetFunction, &kernel, module.get(), "ms_fingerprint");
    kept.module = std::move(module);
    kept.kernel = kernel;
    return kernel;
  } catch (Error& error) {
    error.message = "the fingerprint kernel cannot be loaded on device " +
                    std::to_string(kept.device.ordinal()) + ": " + error.message;
    if (is_final(error.cuda_error)) kept.refusal = error;
    throw;
  }
}

}  // namespace

bool Fingerprinter::available(Device& device) noexcept {
  try {
    Kept& kept = kept_of(device);
    try {
      load_kernel(kept);
      return true;
    } catch (const Error& error) {
      std::lock_guard<std::mutex> lock(kept.mutex);
      if (!kept.warned) {
        kept.warned = true;
        warn(error.message + "; every pause will save all contents");
      }
    }
  } catch (...) {
  }
  return false;
}

Fingerprinter::Fingerprinter(Device& device)
    : device_(device), kernel_(load_kernel(kept_of(device))), stream_(Stream::create(device)) {}

Fingerprinter::~Fingerprinter() {
  if (!exchange_) return;
  try {
    if (driver().cuStreamSynchronize(stream_.get()) != CUDA_SUCCESS) device_.drain();
    // The host memory is kept for the next job, because unpinning it would wait for all work on the
    // device.
    Kept& kept = kept_of(device_);
    std::lock_guard<std::mutex> lock(kept.mutex);
    if (!kept.idle || kept.idle->memory().bytes() < exchange_->memory().bytes()) {
      kept.idle.swap(exchange_);
    }
  } catch (...) {
    // The context was destroyed, and the kernel was destroyed with it.
  }
}

void Fingerprinter::start(const std::vector<Range>& pieces) {
  if (pieces.empty()) return;
  {
    Kept& kept = kept_of(device_);
    std::lock_guard<std::mutex> lock(kept.mutex);
    if (kept.idle && kept.idle->holds(pieces.size())) exchange_ = std::move(kept.idle);
  }
  if (!exchange_) exchange_ = std::make_unique<Exchange>(device_, pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    exchange_->piece(i) = {pieces[i].address, pieces[i].bytes};
  }
  batches_.reserve((pieces.size() + kBatchPieces - 1) / kBatchPieces);
  for (size_t first = 0; first < pieces.size(); first += kBatchPieces) {
    Event end = Event::create(device_);
    CUdeviceptr from = exchange_->device_piece(first);
    CUdeviceptr to = exchange_->device_digest(first);
    uint32_t count = static_cast<uint32_t>(std::min(kBatchPieces, pieces.size() - first));
    void* arguments[] = {&from, &to, &count};
    CU_CHECK(cuLaunchKernel, kernel_, (count + kPiecesPerBlock - 1) / kPiecesPerBlock, 1, 1,
             kThreads, 1, 1, 0, stream_.get(), arguments, nullptr);
    end.record(stream_.get());
    batches_.push_back(std::move(end));
  }
}

const Digest& Fingerprinter::wait(size_t piece) {
  const size_t batch = piece / kBatchPieces;
  if (batch >= batches_.size()) {
    throw Error(Status::kInternal, "wait() was called for a fingerprint that was not requested");
  }
  if (batch >= done_) {
    batches_[batch].wait();
    done_ = batch + 1;
  }
  return exchange_->digest(piece);
}

uint64_t Fingerprinter::trim() noexcept {
  uint64_t released = 0;
  try {
    std::vector<Kept*> all;
    {
      std::lock_guard<std::mutex> lock(all_kept().mutex);
      for (auto& [device, kept] : all_kept().by_device) all.push_back(kept.get());
    }
    for (Kept* kept : all) {
      std::unique_ptr<Exchange>
          idle;  // released without the lock, because unpinning waits for the device
      {
        std::lock_guard<std::mutex> lock(kept->mutex);
        idle.swap(kept->idle);
      }
      if (!idle) continue;
      const uint64_t bytes = idle->memory().bytes();
      if (idle->memory().release()) released += bytes;
    }
  } catch (...) {
  }
  return released;
}

}  // namespace memsaver
