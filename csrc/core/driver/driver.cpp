#include "core/driver/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "core/platform/lifecycle.h"

namespace memsaver {
namespace {

#define MS_SYMBOL_TEXT(name) #name
#define MS_SYMBOL(name) MS_SYMBOL_TEXT(name)

constexpr const char* kAdvice =
    "; memsaver needs NVIDIA's driver 525 or newer, or MEMSAVER_DRIVER=sim for the simulated one";

std::string directory_of_this_library() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&directory_of_this_library), &info) == 0 ||
      !info.dli_fname)
    return ".";
  const std::string path(info.dli_fname);
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// Returns the problem that prevents the simulated driver from starting, such as an invalid
// environment variable (csrc/sim/sim.h), or "".
std::string problem_of_simulator(void* library) {
  const auto query =
      reinterpret_cast<int (*)(char*, size_t)>(dlsym(library, "sim_settings_problem"));
  char text[512] = "";
  return query && query(text, sizeof(text)) > 0 ? text : "";
}

std::unique_ptr<DriverTable> open_driver() {
  auto table = std::make_unique<DriverTable>();
  const char* named = secure_getenv("MEMSAVER_DRIVER");
  table->opened = named && *named ? named : "libcuda.so.1";
  table->simulated = table->opened == "sim";
  const std::string path =
      table->simulated ? directory_of_this_library() + "/libmemsaver_sim.so" : table->opened;

  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* reason = dlerror();
    throw Error(Status::kNotLoaded, "the CUDA driver could not be opened: " +
                                        std::string(reason ? reason : path.c_str()) + kAdvice);
  }
#define MS_DRIVER_RESOLVE(name)                                                                        \
  table->name = reinterpret_cast<decltype(&::name)>(dlsym(handle, MS_SYMBOL(name)));                   \
  if (!table->name) {                                                                                  \
    throw Error(Status::kNotLoaded, path + " has no " MS_SYMBOL(name) ": the driver is too old, or " \
                                           "no CUDA driver" + kAdvice); \
  }
  MS_DRIVER_CALLS(MS_DRIVER_RESOLVE)
#undef MS_DRIVER_RESOLVE

  table->explain_host_faults = table->simulated
                                   ? reinterpret_cast<decltype(table->explain_host_faults)>(
                                         dlsym(handle, "sim_explain_host_faults"))
                                   : nullptr;

  const CUresult result = table->cuInit(0);
  if (result != CUDA_SUCCESS) {
    const std::string problem = table->simulated ? problem_of_simulator(handle) : "";
    if (!problem.empty()) {
      throw Error(Status::kNotLoaded, "the simulated driver does not start: " + problem);
    }
    const char* name = nullptr;
    table->cuGetErrorName(result, &name);
    throw Error(Status::kNotLoaded, path + ": cuInit failed with " +
                                        (name ? name : std::to_string(result)) +
                                        ": no GPU that this process may use" + kAdvice);
  }
  table->cuDriverGetVersion(&table->version);
  return table;
}

std::atomic<const DriverTable*> opened{nullptr};

}  // namespace

const DriverTable& driver() {
  if (const DriverTable* table = opened.load(std::memory_order_acquire)) return *table;
  require_not_forked();
  static std::mutex* const mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  if (!opened.load(std::memory_order_acquire)) {
    set_driver_open(true);  // before the driver is open, so that no forked child is missed
    try {
      opened.store(open_driver().release(), std::memory_order_release);
    } catch (...) {
      set_driver_open(false);
      throw;
    }
  }
  return *opened.load(std::memory_order_acquire);
}

const DriverTable* open_driver_table() noexcept { return opened.load(std::memory_order_acquire); }

std::string describe(CUresult result, const char* call) noexcept try {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (const DriverTable* table = opened.load(std::memory_order_acquire)) {
    table->cuGetErrorName(result, &name);
    table->cuGetErrorString(result, &meaning);
  }
  return std::string(call) + " failed with " + (name ? name : "an unknown error") + " (" +
         std::to_string(static_cast<int>(result)) + ")" +
         (meaning ? std::string(": ") + meaning : "");
} catch (...) {
  return {};
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  Error error(
      result == CUDA_ERROR_OUT_OF_MEMORY ? Status::kOutOfDeviceMemory : Status::kDriverFailed,
      describe(result, call));
  error.call = call;
  error.cuda_error = static_cast<int32_t>(result);
  throw error;
}

bool is_shutdown(CUresult result) noexcept {
  return result == CUDA_ERROR_DEINITIALIZED || result == CUDA_ERROR_NOT_INITIALIZED ||
         result == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

}  // namespace memsaver
