// Records violations and illegal accesses (see sim.h) for tests. The caller of every function must
// own State::mutex (state.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver::sim {

class Diagnostics {
 public:
  void violation(std::string text);
  void illegal_access(std::string text);
  void clear();

  uint64_t violations() const { return violations_; }
  uint64_t illegal_accesses() const { return illegal_accesses_; }
  // Returns the first kKept entries, which include both kinds, in order.
  const std::vector<std::string>& entries() const { return entries_; }

 private:
  void keep(std::string text);

  std::vector<std::string> entries_;
  uint64_t violations_ = 0;
  uint64_t illegal_accesses_ = 0;
};

}  // namespace memsaver::sim
