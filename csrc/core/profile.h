// profile: long work as ranges in a profiler (Nsight Systems), by NVTX.
//
// Which profiler, if any, is settled for the process by the first range: NVTX then loads the
// library that NVTX_INJECTION64_PATH names, as profilers set it for what they start. Without one a
// range costs a load and a branch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// A range on the calling thread, in the NVTX domain "memsaver", for the life of the object. Its
// message says what, whose and how much ("pause 'weights' 15.00 GiB (16106127360 bytes)"), its
// payload is the bytes alone.
//
// Any thread, but made and destroyed by the same one, innermost first; never under the registry's
// lock, because a profiler's library runs inside; and only once the driver is open, because a child
// that was forked while the first range was being made could wait for ever otherwise. Never throws:
// where there is no memory for the message, there is no range.
class ProfileRange {
 public:
  // `what` is a verb; `make_names` gives the tags as a std::vector<std::string>, and is called only
  // where a profiler is attached.
  template <typename MakeNames>
  ProfileRange(const char* what, MakeNames make_names, uint64_t bytes) noexcept {
    if (!attached()) return;
    try {
      begin(what, make_names(), bytes);
    } catch (...) {
    }
  }
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

 private:
  static bool attached() noexcept;
  void begin(const char* what, const std::vector<std::string>& names, uint64_t bytes);

  bool open_ = false;
};

}  // namespace memsaver
