#include "core/platform/workers.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/platform/quiet_start.h"
#include "core/platform/status.h"
#include "core/platform/system_files.h"

namespace memsaver {
namespace {

constexpr unsigned kMostWorkers = 16;

// Returns the number of CPUs that this process may use; nothing if the system does not report it.
std::optional<uint64_t> affine_cpus() {
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    std::vector<cpu_set_t> set(bytes / sizeof(cpu_set_t) + 1);
    if (sched_getaffinity(0, bytes, set.data()) == 0) {
      return static_cast<uint64_t>(CPU_COUNT_S(bytes, set.data()));
    }
    if (errno != EINVAL) return std::nullopt;  // EINVAL: the mask is too small
  }
  return std::nullopt;
}

// Returns the CPU quota of a control group, in whole CPUs.
std::optional<uint64_t> quota_cpus(const Cgroup& group) {
  uint64_t quota = 0, period = 0;
  if (group.unified) {
    // "quota period" in microseconds; "max" is not a number.
    const std::string text = group.read("cpu.max").value_or("");
    char* rest = nullptr;
    quota = std::strtoull(text.c_str(), &rest, 10);
    period = std::strtoull(rest, nullptr, 10);
  } else {
    quota = group.number("cpu.cfs_quota_us").value_or(0);
    period = group.number("cpu.cfs_period_us").value_or(0);
  }
  if (quota == 0 || period == 0) return std::nullopt;
  return (quota - 1) / period + 1;
}

// Starts a thread that runs `body`, and adds it to `threads`, which has room for it. Returns false
// if no thread could be started.
template <typename Body>
bool start(std::vector<std::thread>& threads, Body body) noexcept try {
  threads.emplace_back([body] {
    pthread_setname_np(pthread_self(), "memsaver");
    body();
  });
  return true;
} catch (...) {
  return false;  // no thread, or no memory for one
}

}  // namespace

unsigned worker_count() {
  uint64_t cpus = affine_cpus().value_or(1);
  for (const Cgroup& group : cgroups_of("cpu")) {
    cpus = std::min(cpus, quota_cpus(group).value_or(cpus));
  }
  return static_cast<unsigned>(std::clamp<uint64_t>(cpus, 1, kMostWorkers));
}

Workers::Workers(size_t count, std::function<void(size_t)> job, unsigned threads)
    : job_(std::move(job)), jobs_(count) {
  const size_t wanted = std::min<size_t>(threads, count);
  threads_.reserve(wanted);
  const QuietStart quiet;
  while (threads_.size() < wanted && start(threads_, [this] { work(); })) {
  }
}

Workers::~Workers() {
  cancel();
  for (std::thread& thread : threads_) thread.join();
}

bool Workers::run_next(std::unique_lock<std::mutex>& lock) {
  if (cancelled_ || next_ == jobs_.size()) return false;
  const size_t index = next_++;
  jobs_[index].progress = Progress::kRunning;
  ++running_;
  lock.unlock();
  std::exception_ptr error;
  try {
    job_(index);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  jobs_[index].error = std::move(error);
  jobs_[index].progress = Progress::kDone;
  --running_;
  changed_.notify_all();
  return true;
}

void Workers::work() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  while (run_next(lock)) {
  }
}

void Workers::wait_for(size_t index) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (index >= jobs_.size()) {
    throw Error(Status::kInternal, "there is no job " + std::to_string(index));
  }
  Job& job = jobs_[index];
  if (threads_.empty()) {
    while (job.progress == Progress::kWaiting && run_next(lock)) {
    }
  }
  changed_.wait(lock, [&] {
    return job.progress == Progress::kDone || (cancelled_ && job.progress == Progress::kWaiting);
  });
  if (job.progress != Progress::kDone) {
    throw Error(Status::kInternal, "job " + std::to_string(index) + " was cancelled");
  }
  if (job.error) std::rethrow_exception(job.error);
}

void Workers::cancel() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return running_ == 0; });
}

void run_in_parallel(size_t count, const std::function<void(size_t)>& call) {
  if (count == 0) return;
  std::vector<std::exception_ptr> errors(count);
  const auto run = [&](size_t index) {
    try {
      call(index);
    } catch (...) {
      errors[index] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(count - 1);
  {
    const QuietStart quiet;
    while (threads.size() < count - 1 &&
           start(threads, [&run, index = threads.size() + 1] { run(index); })) {
    }
  }
  run(0);
  for (size_t index = threads.size() + 1; index < count; ++index) run(index);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace memsaver
