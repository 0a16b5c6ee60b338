#include "core/fingerprint.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>

#include "core/driver.h"
#include "core/kernel_image.h"
#include "core/log.h"
#include "core/text.h"

namespace memsaver {
namespace {

using fingerprint::kPiecesPerBlock;
using fingerprint::kThreads;

static_assert(Fingerprinter::kBatchPieces % kPiecesPerBlock == 0);

// The host memory of a job: 48 bytes for each piece, 3 MiB for 64 GiB. It is pinned in units of
// this, so that the next job, of about as many pieces, finds enough.
constexpr uint64_t kExchangeUnit = 256 << 10;

std::atomic<uint64_t> exchange_bytes{0};  // of all jobs

// What says that this GPU or driver will never take the kernel, rather than not now.
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

// Pieces on their way to the kernel and fingerprints on their way back, in host memory that the
// device reaches: the kernel needs no memory of the device, which may be full.
class Fingerprinter::Exchange {
 public:
  // Room for so many pieces. In a DeviceScope, like the destructor. Throws kOutOfHostMemory,
  // kDriverFailed.
  explicit Exchange(size_t pieces) : pages_(bytes_for(pieces)) {
    pinned_ = PinnedRange::pin(pages_.start, pages_.bytes,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    CU_CHECK(cuMemHostGetDevicePointer, &device_address_, pages_.start, 0);
    exchange_bytes += pages_.bytes;
  }
  ~Exchange() {
    if (!unpin()) pages_.leave();  // still pinned, they must not become somebody else's
  }

  // Whether the pages are pinned no more: it is tried twice.
  bool unpin() noexcept {
    for (int tries = 0; tries < 2 && pinned_.bytes() != 0; ++tries) {
      try {
        const uint64_t bytes = pinned_.bytes();
        pinned_.unpin();
        exchange_bytes -= bytes;
      } catch (...) {
      }
    }
    return pinned_.bytes() == 0;
  }

  bool holds(size_t pieces) const { return bytes_for(pieces) <= pages_.bytes; }
  uint64_t bytes() const { return pages_.bytes; }

  FingerprintPiece& piece(size_t index) const {
    return static_cast<FingerprintPiece*>(pages_.start)[index];
  }
  const Digest& digest(size_t index) const {
    return reinterpret_cast<const Digest*>(static_cast<char*>(pages_.start) +
                                           pieces_bytes())[index];
  }

  // The same as the device sees them.
  CUdeviceptr device_piece(size_t index) const {
    return device_address_ + index * sizeof(FingerprintPiece);
  }
  CUdeviceptr device_digest(size_t index) const {
    return device_address_ + pieces_bytes() + index * sizeof(Digest);
  }

 private:
  static constexpr uint64_t kPieceBytes = sizeof(FingerprintPiece) + sizeof(Digest);

  struct Pages {
    explicit Pages(uint64_t size) : bytes(size) {
      start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (start == MAP_FAILED) {
        Error error(Status::kOutOfHostMemory, "the system has no " + format_bytes(size) +
                                                  " of memory for the fingerprints of a pause");
        error.needed_bytes = size;
        throw error;
      }
      madvise(start, size, MADV_DONTFORK);  // the device writes into these pages, not into copies
    }
    ~Pages() {
      if (start) munmap(start, bytes);
    }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    void leave() { start = nullptr; }

    void* start = nullptr;
    uint64_t bytes;
  };

  static uint64_t bytes_for(size_t pieces) {
    return (pieces * kPieceBytes + kExchangeUnit - 1) / kExchangeUnit * kExchangeUnit;
  }
  uint64_t pieces_bytes() const { return pages_.bytes / kPieceBytes * sizeof(FingerprintPiece); }

  Pages pages_;
  PinnedRange pinned_;
  CUdeviceptr device_address_ = 0;
};

// What a device has of us, as long as the process lives.
struct Fingerprinter::Kept {
  explicit Kept(Device& device) : device(device) {}

  Device& device;
  std::mutex mutex;  // over all below
  Module module;
  CUfunction kernel = nullptr;
  std::optional<Error> refusal;  // for good
  bool warned = false;
  std::unique_ptr<Exchange> idle;
  std::vector<std::unique_ptr<Exchange>> stuck;  // could not be unpinned: trim() tries again
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

// The kernel, loaded where it is not yet.
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
        warn(error.message + "; everything is saved, changed or not");
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
    // Kept for the next job: unpinning it would wait for all work of the device.
    Kept& kept = kept_of(device_);
    std::lock_guard<std::mutex> lock(kept.mutex);
    if (!kept.idle || kept.idle->bytes() < exchange_->bytes()) kept.idle.swap(exchange_);
    if (exchange_ && !exchange_->unpin()) kept.stuck.push_back(std::move(exchange_));
  } catch (...) {
    // The context is gone, and the kernel with it.
  }
}

void Fingerprinter::start(const std::vector<Range>& pieces) {
  if (pieces.empty()) return;
  {
    Kept& kept = kept_of(device_);
    std::lock_guard<std::mutex> lock(kept.mutex);
    if (kept.idle && kept.idle->holds(pieces.size())) exchange_ = std::move(kept.idle);
  }
  if (!exchange_) exchange_ = std::make_unique<Exchange>(pieces.size());
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
    throw Error(Status::kInternal, "a fingerprint is waited for that was never asked for");
  }
  if (batch >= done_) {
    batches_[batch].wait();
    done_ = batch + 1;
  }
  return exchange_->digest(piece);
}

uint64_t Fingerprinter::held_bytes() noexcept { return exchange_bytes; }

uint64_t Fingerprinter::trim() noexcept {
  uint64_t released = 0;
  try {
    std::vector<Kept*> all;
    {
      std::lock_guard<std::mutex> lock(all_kept().mutex);
      for (auto& [device, kept] : all_kept().by_device) all.push_back(kept.get());
    }
    for (Kept* kept : all) {
      {
        std::lock_guard<std::mutex> lock(kept->mutex);
        if (!kept->idle && kept->stuck.empty()) continue;
      }
      std::optional<DeviceScope> scope;
      try {
        scope.emplace(kept->device);
      } catch (const Error&) {
        continue;  // theirs are kept
      }
      // Unpinned without the lock: that waits for the device. What is taken out finds room again.
      std::vector<std::unique_ptr<Exchange>> going, room;
      {
        std::lock_guard<std::mutex> lock(kept->mutex);
        kept->stuck.reserve(kept->stuck.size() + 1);
        room.reserve(kept->stuck.size() + 1);
        if (kept->idle) kept->stuck.push_back(std::move(kept->idle));
        going.swap(kept->stuck);
        kept->stuck.swap(room);
      }
      for (std::unique_ptr<Exchange>& exchange : going) {
        if (exchange->unpin()) {
          released += exchange->bytes();
          continue;
        }
        std::lock_guard<std::mutex> lock(kept->mutex);
        kept->stuck.push_back(std::move(exchange));
      }
    }
  } catch (...) {
  }
  return released;
}

}  // namespace memsaver
