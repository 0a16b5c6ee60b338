// workers: threads for host work (touching pages, reading and writing files), and how many.
//
// There is no pool: threads live as long as the call that needs them, so there is nothing to fork
// and nothing to end at exit. They block every signal but those of their own faults, so that no
// handler of the user's runs on them. They know nothing of CUDA: a job that needs a device enters
// its own DeviceScope. Where the system gives no threads the work is done all the same, by fewer or
// by the caller.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace memsaver {

// How many threads keep the CPUs busy that this process may use: its affinity, and the quota of its
// control groups, rounded up; from 1 to 16 (by 16 threads the memory is busy: pages are touched at
// 65 GB/s, with 4 at 32, on an H200's host). Asks the system each time: some tens of microseconds.
unsigned worker_count();

// Runs job(0) to job(count - 1) in the background. Each thread takes the next index: jobs start in
// order and finish in any.
//
// The job and what it refers to must outlive this object. A job must not wait for another one.
// wait_for and cancel may be called by any thread but a job's.
class Workers {
 public:
  // Starts at most `threads` threads, and no more than there are jobs. Throws std::bad_alloc only.
  Workers(size_t count, std::function<void(size_t)> job, unsigned threads = worker_count());

  // Cancels. An error that nobody waited for is lost.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Returns when job(index) is done; throws what it threw, each time it is asked. Without any
  // thread the caller runs the jobs up to that one. Throws kInternal for a job that was cancelled,
  // and for an index that there is not.
  void wait_for(size_t index);

  // Starts no further job, and returns when those that run are done.
  void cancel() noexcept;

 private:
  enum class Progress { kWaiting, kRunning, kDone };
  struct Job {
    Progress progress = Progress::kWaiting;
    std::exception_ptr error;
  };

  // Runs the next job with the lock (of mutex_) dropped meanwhile; false when none may start.
  bool run_next(std::unique_lock<std::mutex>& lock);
  void work() noexcept;

  const std::function<void(size_t)> job_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job> jobs_;  // this and the next two under the mutex
  size_t next_ = 0;
  size_t running_ = 0;
  bool cancelled_ = false;
  std::vector<std::thread> threads_;  // the constructor's and the destructor's
};

// Runs call(0) to call(count - 1), each on a thread of its own, the first on the caller, and
// returns when all are done; throws the error of the lowest index that failed. Calls that find no
// thread run on the caller, one after the other, so they must not wait for each other.
void run_in_parallel(size_t count, const std::function<void(size_t)>& call);

}  // namespace memsaver
