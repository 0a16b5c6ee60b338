// profile: reports long operations to a profiler (Nsight Systems) as NVTX ranges.
//
// The first range determines the process's profiler: NVTX loads the library that
// NVTX_INJECTION64_PATH names. Profilers set this variable for programs that they start. Without a
// profiler, a range costs a load and a branch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// A range in the NVTX domain "memsaver" on the calling thread, which lasts as long as the object.
// The message contains the action, the tags and the size ("pause 'weights' 15.00 GiB (16106127360
// bytes)"); the payload contains only the number of bytes.
//
// Any thread may create a range, but the same thread must destroy it, and inner ranges must be
// destroyed before outer ranges. A range must not be created or destroyed under the registry's
// lock, because both operations run the profiler's library. A range must not exist before the
// driver is open, because a child that is forked during the creation of the first range could wait
// indefinitely. Never throws: if there is no memory for the message, no range is reported.
class ProfileRange {
 public:
  // `what` is a verb. `make_names` returns the tags as a std::vector<std::string>; the function is
  // called only if a profiler is attached.
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
