// workers: threads for work on the host (touching pages, reading and writing files).
//
// There is no thread pool: threads exist only during the call that needs them, so fork and exit
// need no special handling. The threads block all signals except those for their own faults, so
// that none of the program's signal handlers run on them. The threads themselves do not use CUDA: a
// job that needs a device enters its own DeviceScope. If the system cannot start enough threads,
// fewer threads, or only the calling thread, do the work.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace memsaver {

// Returns the number of threads that keep this process's CPUs busy, from 1 to 16. This is the
// number of CPUs in the process's affinity mask, limited by the quota of its control groups and
// rounded up. (On the host of an H200, 16 threads saturate the memory: they touch pages at 65 GB/s,
// and 4 threads touch pages at 32 GB/s.) Reads system files, which takes tens of microseconds.
unsigned worker_count();

// Runs job(0) to job(count - 1) in the background. Each thread runs the job with the next index, so
// jobs start in order and finish in any order.
//
// The job and the objects that it refers to must outlive this object. A job must not wait for
// another job. Any thread that is not running a job may call wait_for() and cancel().
class Workers {
 public:
  // Starts at most `threads` threads, and at most one per job. Throws only std::bad_alloc.
  Workers(size_t count, std::function<void(size_t)> job, unsigned threads = worker_count());

  // Calls cancel() and drops errors that wait_for() has not reported.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Returns when job(index) has ended. If the job threw an exception, every call rethrows it. If no
  // thread could be started, the calling thread runs the jobs up to that index. Throws kInternal
  // for a cancelled job or an invalid index.
  void wait_for(size_t index);

  // Prevents further jobs from starting, and returns when all running jobs have ended.
  void cancel() noexcept;

 private:
  enum class Progress { kWaiting, kRunning, kDone };
  struct Job {
    Progress progress = Progress::kWaiting;
    std::exception_ptr error;
  };

  // Runs the next job with mutex_ unlocked. Returns false if no job may start.
  bool run_next(std::unique_lock<std::mutex>& lock);
  void work() noexcept;

  const std::function<void(size_t)> job_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job> jobs_;  // this field and the next two need the mutex
  size_t next_ = 0;
  size_t running_ = 0;
  bool cancelled_ = false;
  std::vector<std::thread> threads_;  // used only by the constructor and the destructor
};

// Runs call(0) to call(count - 1), each on its own thread (the first on the calling thread), and
// returns when all have ended. Throws the exception of the failed call with the lowest index. If
// threads cannot be started, their calls run on the calling thread, one after the other. Therefore,
// the calls must not wait for each other.
void run_in_parallel(size_t count, const std::function<void(size_t)>& call);

}  // namespace memsaver
