// Counters and injected failures for each of the simulated driver's calls, by name. The caller of
// every function must own State::mutex (state.h).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace memsaver::sim {

struct Fault {
  std::string call;    // plain name
  uint64_t nth = 1;    // 1: the next call
  int code = 0;        // a CUresult
  uint64_t times = 1;  // the number of consecutive calls; 0: all later ones
};

class Faults {
 public:
  Faults();

  // Adds a fault, and returns its number, or -1 if the name is unknown or nth is 0.
  int64_t add(const Fault& fault);
  // Removes a fault, if it still exists.
  void remove(int64_t number);
  void clear();
  // Counts a call. Returns CUDA_SUCCESS unless a fault applies.
  CUresult count(std::string_view call);
  uint64_t calls(std::string_view call) const;

 private:
  struct Pending {
    int64_t number;
    uint64_t calls_before;
    CUresult code;
    uint64_t times;
  };
  struct Entry {
    uint64_t calls = 0;
    std::vector<Pending> pending;
  };
  std::map<std::string, Entry, std::less<>> entries_;
  int64_t added_ = 0;
};

}  // namespace memsaver::sim
