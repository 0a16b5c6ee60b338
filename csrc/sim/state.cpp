#include "state.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "settings.h"

namespace memsaver::sim {
namespace {

std::atomic<bool> g_initialized{false};
std::atomic<bool> g_forked{false};
Settings* g_settings = nullptr;

void after_fork_in_child() {
  if (g_initialized.load()) g_forked.store(true);
}

const char* why_refused(int reason) {
  if (reason == EFBIG) return "; raise the limit of file sizes (ulimit -f) until cuInit is done";
  if (reason == EMFILE) return "; close files or raise the limit of open files (ulimit -n)";
  return "";
}

// Keeps the library loaded, because its threads may run at any time.
void stay_loaded() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&stay_loaded), &info) == 0 || info.dli_fname == nullptr) {
    return;
  }
  dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace

State& state() {
  static State* const instance = new State;
  return *instance;
}

uint64_t State::next_handle() {
  static uint64_t last = 0x10000;
  return last += 16;
}

Device* State::device(int ordinal) {
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) return nullptr;
  return devices[static_cast<size_t>(ordinal)].get();
}

bool in_forked_child() { return g_forked.load(); }

CUresult read_environment() {
  State& shared = state();
  if (shared.settings_read) return CUDA_SUCCESS;
  Settings settings;
  shared.settings_problem = read_settings(&settings);
  if (!shared.settings_problem.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const Fault& fault : settings.faults) shared.faults.add(fault);
  g_settings = new Settings(settings);
  shared.settings_read = true;
  return CUDA_SUCCESS;
}

CUresult initialize() {
  State& shared = state();
  if (shared.initialized) return CUDA_SUCCESS;
  if (g_settings->devices == 0) {
    shared.settings_problem = "MEMSAVER_SIM_DEVICES=0 leaves no device: set it to 1 or more";
    return CUDA_ERROR_NO_DEVICE;
  }
  std::vector<std::unique_ptr<Device>> devices;
  for (int ordinal = 0; ordinal < g_settings->devices; ++ordinal) {
    devices.push_back(std::make_unique<Device>(ordinal, g_settings->memory_bytes));
    if (!devices.back()->memory.open()) {
      shared.settings_problem = std::string("cannot create the file of a device's memory: ") +
                                std::strerror(errno) + why_refused(errno);
      return CUDA_ERROR_OPERATING_SYSTEM;
    }
  }
  if (pthread_atfork(nullptr, nullptr, &after_fork_in_child) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  stay_loaded();
  shared.devices = std::move(devices);
  shared.initialized = true;
  shared.settings_problem.clear();
  g_initialized.store(true);
  return CUDA_SUCCESS;
}

}  // namespace memsaver::sim
