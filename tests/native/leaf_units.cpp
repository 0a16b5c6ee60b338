// Runs units of the core that the C ABI cannot reach separately. `leaf_units CASE [ARGUMENT...]`
// prints the results, which tests/leaf_units checks.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <functional>

#include "core/platform/host_budget.h"
#include "core/platform/numa.h"
#include "core/platform/options.h"
#include "core/platform/workers.h"
#include "native/leaf.h"

namespace {

void pause_for(double seconds) {
  const timespec time{0, static_cast<long>(seconds * 1e9)};
  nanosleep(&time, nullptr);
}

std::atomic<int> threads_to_grant{1 << 20};
std::atomic<int> threads_granted{0};

// --- host memory

std::string figures(const HostClaim& claim) {
  return "claimed " + std::to_string(HostClaim::claimed() >> 20) + " available " +
         std::to_string(host_available_bytes() >> 20) + " this " +
         std::to_string(claim.bytes() >> 20) + " touched " +
         std::to_string(claim.touched_bytes() >> 20);
}

void available(const Arguments&) { say(std::to_string(host_available_bytes())); }

// Runs the operations in the arguments on one claim, in MiB, and prints the figures after each.
void claim(const Arguments& arguments) {
  HostClaim claim;
  for (size_t i = 0; i + 1 < arguments.size(); i += 2) {
    const uint64_t bytes = number(arguments[i + 1]) << 20;
    attempt([&] {
      if (arguments[i] == "take") claim = HostClaim::take(bytes, HostUse::kBackup);
      if (arguments[i] == "grow") claim.grow(bytes, HostUse::kBackup);
      if (arguments[i] == "touched") claim.touched(bytes);
      if (arguments[i] == "shrink") claim.shrink(bytes);
      if (arguments[i] == "untouched") claim.shrink_untouched(bytes);
      if (arguments[i] == "option") set_option("host_bytes", arguments[i + 1] + "MiB");
    });
    say(figures(claim));
  }
  HostClaim moved(std::move(claim));
  say("moved: " + figures(claim));
  moved = HostClaim();
  say("dropped: " + figures(moved));
}

// Many threads claim the same memory: prints how many were granted it, and the bytes claimed.
void claims_at_once(const Arguments& arguments) {
  const uint64_t bytes = number(arguments[0]) << 20;
  std::vector<HostClaim> claims(8);
  std::atomic<int> granted{0}, refused{0};
  run_in_parallel(claims.size(), [&](size_t index) {
    try {
      claims[index] = HostClaim::take(bytes, HostUse::kBackup);
      ++granted;
    } catch (const Error&) {
      ++refused;
    }
  });
  say("granted " + std::to_string(granted) + " refused " + std::to_string(refused) + " claimed " +
      std::to_string(HostClaim::claimed() >> 20));
  claims.clear();
  say("claimed " + std::to_string(HostClaim::claimed()));
}

// --- NUMA

void node_of(const Arguments& arguments) { say(std::to_string(numa_node_of_pci(arguments[0]))); }

// Prefers a node for a mapping, writes to the memory, and prints the policy from the kernel.
void prefer(const Arguments& arguments) {
  constexpr uint64_t kBytes = 4 << 20;
  char* const memory = static_cast<char*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  errno = 0;
  prefer_node(memory, kBytes, std::atoi(arguments[0].c_str()));
  int mode = -1;
  unsigned long nodes[32] = {};
  constexpr int kByAddress = 2;  // MPOL_F_ADDR
  if (syscall(SYS_get_mempolicy, &mode, nodes, sizeof(nodes) * 8, memory, kByAddress) != 0) {
    say("the kernel does not say");
    return;
  }
  std::memset(memory, 7, kBytes);
  say("mode " + std::to_string(mode) + " nodes " + std::to_string(nodes[0]) + " byte " +
      std::to_string(memory[kBytes - 1]));
}

// --- workers

void worker_count_case(const Arguments&) { say(std::to_string(worker_count())); }

// Checks that every job runs once, and in order on a single thread; prints the threads used.
void workers_order(const Arguments& arguments) {
  threads_to_grant = static_cast<int>(number(arguments[0]));
  const pthread_t caller = pthread_self();
  std::vector<int> started(100, -1);
  std::atomic<int> clock{0};
  std::atomic<int> on_caller{0};
  {
    Workers workers(
        started.size(),
        [&](size_t index) {
          started[index] = clock++;
          if (pthread_equal(caller, pthread_self())) ++on_caller;
        },
        static_cast<unsigned>(number(arguments[1])));
    workers.wait_for(7);
    if (started[7] < 0) say("7 is not done");
    for (size_t i = 0; i < started.size(); ++i) workers.wait_for(i);
  }
  for (size_t i = 0; i < started.size(); ++i) {
    if (started[i] < 0) say(std::to_string(i) + " never ran");
  }
  if (clock != 100) say("some ran twice");
  say("threads " + std::to_string(threads_granted) + " on caller " + std::to_string(on_caller));
  if (threads_granted < 2) {
    for (size_t i = 0; i < started.size(); ++i) {
      if (started[i] != static_cast<int>(i)) say(std::to_string(i) + " ran out of order");
    }
  }
}

// The constructing thread continues, and can wait for a later index while an earlier job runs.
void workers_background(const Arguments&) {
  std::atomic<bool> release{false};
  Workers workers(
      2,
      [&](size_t index) {
        while (index == 0 && !release) pause_for(0.001);
      },
      2);
  workers.wait_for(1);
  say("1 is done");
  release = true;
  workers.wait_for(0);
  say("0 is done");
}

void workers_error(const Arguments& arguments) {
  threads_to_grant = static_cast<int>(number(arguments[0]));
  std::atomic<int> ran{0};
  Workers workers(
      10,
      [&](size_t index) {
        ++ran;
        if (index == 3) throw Error(Status::kBackupFailed, "job 3 is broken");
      },
      2);
  for (size_t i = 0; i < 10; ++i) attempt([&] { workers.wait_for(i); });
  attempt([&] { workers.wait_for(3); });
  attempt([&] { workers.wait_for(10); });
  say("ran " + std::to_string(ran));
}

// A slow job that counts its calls.
struct SlowJob {
  std::atomic<int> begun{0}, ended{0};

  void operator()(size_t) {
    ++begun;
    pause_for(0.02);
    ++ended;
  }

  // Checks that workers stopped after the first of a thousand jobs ran only a few of them.
  void check_stopped() const {
    if (begun != ended) say("a job still runs");
    if (begun > 10) say("too many ran: " + std::to_string(begun));
  }
};

// After cancel() returns, no job is running and no further job starts.
void workers_cancel(const Arguments&) {
  SlowJob job;
  Workers workers(1000, std::ref(job), 2);
  workers.wait_for(0);
  workers.cancel();
  const int at_cancel = job.begun;
  job.check_stopped();
  pause_for(0.05);
  if (job.begun != at_cancel) say("a job started later");
  attempt([&] { workers.wait_for(0); });
  attempt([&] { workers.wait_for(999); });
}

void workers_destroyed(const Arguments&) {
  SlowJob job;
  {
    Workers workers(1000, std::ref(job), 2);
    workers.wait_for(0);
  }
  job.check_stopped();
  {
    Workers none(0, [](size_t) { say("ran"); });
  }
  {
    Workers idle(3, [](size_t) {}, 0);
  }
}

// Workers block signals to the process, so that only the program's own threads receive them.
void workers_signals(const Arguments&) {
  std::atomic<int> term{-1}, fault{-1};
  Workers workers(
      1,
      [&](size_t) {
        sigset_t blocked;
        pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
        term = sigismember(&blocked, SIGTERM) + sigismember(&blocked, SIGINT) +
               sigismember(&blocked, SIGPROF) + sigismember(&blocked, SIGXFSZ);
        fault = sigismember(&blocked, SIGSEGV) + sigismember(&blocked, SIGBUS);
      },
      1);
  workers.wait_for(0);
  sigset_t mine;
  pthread_sigmask(SIG_SETMASK, nullptr, &mine);
  say("blocked " + std::to_string(term) + " of 4, faults " + std::to_string(fault) +
      ", the caller's " + std::to_string(sigismember(&mine, SIGTERM)));
}

void parallel(const Arguments& arguments) {
  threads_to_grant = static_cast<int>(number(arguments[0]));
  const pthread_t caller = pthread_self();
  std::atomic<int> ran{0}, on_caller{0};
  bool first_on_caller = false;
  attempt([&] {
    run_in_parallel(5, [&](size_t index) {
      ++ran;
      if (pthread_equal(caller, pthread_self())) {
        ++on_caller;
        if (index == 0) first_on_caller = true;
      }
      if (index >= 3) throw Error(Status::kDriverFailed, "call " + std::to_string(index));
    });
  });
  say("ran " + std::to_string(ran) + " on caller " + std::to_string(on_caller) + " the first " +
      (first_on_caller ? "too" : "not"));
  run_in_parallel(0, [](size_t) { say("ran"); });
}

const Cases kCases = {
    {"available", available},
    {"claim", claim},
    {"claims_at_once", claims_at_once},
    {"node_of", node_of},
    {"prefer", prefer},
    {"worker_count", worker_count_case},
    {"workers_order", workers_order},
    {"workers_background", workers_background},
    {"workers_error", workers_error},
    {"workers_cancel", workers_cancel},
    {"workers_destroyed", workers_destroyed},
    {"workers_signals", workers_signals},
    {"parallel", parallel},
};

}  // namespace

// Replaces libc's function: fails after the permitted number of threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  if (threads_to_grant-- <= 0) return EAGAIN;
  ++threads_granted;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, start, argument);
}

int main(int count, char** words) {
  for (const Cases* cases : {&kCases, &kFileCases}) {
    const auto found = count > 1 ? cases->find(words[1]) : cases->end();
    if (found == cases->end()) continue;
    found->second(Arguments(words + 2, words + count));
    return 0;
  }
  return 2;
}
