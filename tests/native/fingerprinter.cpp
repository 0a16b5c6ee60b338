// Uses core/backup/fingerprint as higher layers do, on the driver that MEMSAVER_DRIVER names.
// Prints its observations, one per line, for tests/backup/test_fingerprint.py. A single translation
// unit, so that it compiles quickly.
#include "core/backup/fingerprint.cpp"
#include "core/driver/context.cpp"
#include "core/driver/deferred_release.cpp"
#include "core/driver/device.cpp"
#include "core/driver/driver.cpp"
#include "core/driver/handles.cpp"
#include "core/driver/kernel_image.cpp"
#define opened opened_of_lifecycle
#include "core/platform/lifecycle.cpp"
#undef opened
#include <cstdio>
#include <cstring>
#include <thread>

#include "core/driver/pinned_memory.cpp"
#include "core/platform/host_budget.cpp"
#include "core/platform/log.cpp"
#include "core/platform/numa.cpp"
#include "core/platform/options.cpp"
#include "core/platform/range.cpp"
#include "core/platform/system_files.cpp"
#include "core/platform/text.cpp"
#include "sim/sim.h"

using namespace memsaver;

namespace {

int (*fail)(const char*, uint64_t, int, uint64_t);
int (*counts)(sim_totals*);
void (*delay)(uint64_t);
uint64_t (*calls)(const char*);

template <typename Function>
void find(Function* function, void* library, const char* name) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
}

void say_warnings() {
  std::string text;
  int count = 0;
  while (next_warning(&text)) ++count;
  std::printf("warnings: %d\n", count);
}

sim_totals totals() {
  sim_totals now;
  counts(&now);
  return now;
}

}  // namespace

int main() {
  const DriverTable& table = driver();
  void* const simulator = dlopen(table.opened.c_str(), RTLD_NOW | RTLD_NOLOAD);
  find(&fail, simulator, "sim_fail");
  find(&counts, simulator, "sim_counts");
  find(&delay, simulator, "sim_stream_delay");
  find(&calls, simulator, "sim_calls");
  Device& device = Device::get(0);

  constexpr uint64_t kPiece = kFingerprintBytes;
  // Temporarily unavailable because a call fails: warns only once.
  for (int i = 0; i < 2; ++i) {
    fail("cuModuleLoadData", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
    std::printf("available: %d\n", Fingerprinter::available(device));
  }
  fail("cuModuleGetFunction", 1, CUDA_ERROR_LAUNCH_FAILED, 1);
  std::printf("available: %d\n", Fingerprinter::available(device));
  std::printf("modules: %d\n", static_cast<int>(totals().modules));
  say_warnings();
  std::printf("available: %d\n", Fingerprinter::available(device));
  say_warnings();

  // The fingerprints of a batch are available before the next batch is done.
  {
    DeviceScope scope(device);
    const uint64_t bytes = device.granularity();
    VaReservation place = VaReservation::reserve(bytes, bytes);
    Mapping memory =
        Mapping::map(place.address(), PhysicalMemory::create(device, bytes), device.access());
    delay(200000);
    const std::vector<Range> pieces(2 * Fingerprinter::kBatchPieces + 1, {place.address(), 4096});
    {
      Fingerprinter job(device);
      job.start(pieces);
      const Digest first = job.wait(Fingerprinter::kBatchPieces - 1);
      std::printf("left after the first batch: %d\n", totals().queued_operations > 0);
      bool equal = true;
      for (size_t i = pieces.size(); i-- > 0;) equal = equal && job.wait(i) == first;
      std::printf("left after the last: %d, equal: %d\n", totals().queued_operations > 0, equal);
      try {
        job.wait(3 * Fingerprinter::kBatchPieces);
      } catch (const Error& error) {
        std::printf("never asked for: %d\n", static_cast<int>(error.status));
      }
    }
    {
      Fingerprinter job(device);
      job.start(pieces);
    }
    std::printf("left after the object: %d\n", totals().queued_operations > 0);
    delay(0);
  }
  const sim_totals after = totals();
  std::printf("streams: %d, events: %d, violations: %d\n", static_cast<int>(after.streams),
              static_cast<int>(after.events), static_cast<int>(after.violations));
  std::printf("kept: %d\n", after.registered_bytes > 0);
  std::printf("trimmed: %d\n", Fingerprinter::trim() == after.registered_bytes);
  std::printf("kept: %d\n", totals().registered_bytes > 0);

  // The kernel does not support this GPU: it is loaded only once.
  Device& other = Device::get(1);
  fail("cuModuleLoadData", 1, CUDA_ERROR_NO_BINARY_FOR_GPU, 1);
  const uint64_t before = calls("cuModuleLoadData");
  std::printf("available: %d\n", Fingerprinter::available(other));
  std::printf("available: %d\n", Fingerprinter::available(other));
  try {
    Fingerprinter job(other);
  } catch (const Error& error) {
    std::printf("refused: %d %d %s\n", static_cast<int>(error.status), error.cuda_error,
                error.call);
  }
  std::printf("loads: %d\n", static_cast<int>(calls("cuModuleLoadData") - before));
  say_warnings();
}
