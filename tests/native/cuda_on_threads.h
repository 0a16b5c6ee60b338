// The subset of CUDA C++ that runs a kernel's source on the CPU, one block at a time, with one CPU
// thread for each CUDA thread. The kernel's blocks must share no data, and its warps must be
// complete.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

using std::max;
using std::min;

struct Index {
  uint32_t x;
};
inline thread_local Index threadIdx, blockIdx;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

template <typename T>
T __ldcs(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) __builtin_trap();  // as on a GPU
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

class Barrier {
 public:
  explicit Barrier(uint32_t count) : count_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t turn = turn_;
    if (++waiting_ == count_) {
      waiting_ = 0;
      ++turn_;
      all_here_.notify_all();
      return;
    }
    all_here_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  const uint32_t count_;
  uint32_t waiting_ = 0;
  uint64_t turn_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

struct Warp {
  Barrier barrier{32};
  uint64_t values[32];
};
struct Block {
  explicit Block(uint32_t threads) : barrier(threads), warps(threads / 32) {}
  Barrier barrier;
  std::vector<Warp> warps;
};
inline Block* block = nullptr;

inline void __syncthreads() { block->barrier.wait(); }

// Collects the values of all threads in the warp and returns use(values, lane) in each thread.
template <typename T, typename Use>
auto exchange(T value, Use use) {
  Warp& warp = block->warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  warp.barrier.wait();
  const auto result = use(warp.values, threadIdx.x % 32);
  warp.barrier.wait();
  return result;
}

template <typename T>
T __shfl_down_sync(uint32_t, T value, int distance) {
  return exchange(value, [&](const uint64_t* values, uint32_t lane) {
    const uint32_t from = lane + static_cast<uint32_t>(distance);
    return static_cast<T>(values[from < 32 ? from : lane]);
  });
}

inline bool __any_sync(uint32_t, bool value) {
  return exchange<uint64_t>(value, [](const uint64_t* values, uint32_t) {
    return std::any_of(values, values + 32, [](uint64_t given) { return given != 0; });
  });
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, uint32_t blocks, uint32_t threads, Arguments... arguments) {
  for (uint32_t b = 0; b < blocks; ++b) {
    Block shared(threads);
    block = &shared;
    std::vector<std::thread> running;
    for (uint32_t t = 0; t < threads; ++t) {
      running.emplace_back([=] {
        blockIdx.x = b;
        threadIdx.x = t;
        kernel(arguments...);
      });
    }
    for (std::thread& thread : running) thread.join();
  }
}
