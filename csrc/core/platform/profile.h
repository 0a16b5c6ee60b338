// profile: reports long operations as ranges to a profiler (Nsight Systems), through NVTX.
//
// The first range determines the profiler of the process: NVTX loads the library in
// NVTX_INJECTION64_PATH, which profilers set for programs that they start. Without a profiler a
// range costs a load and a branch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// A range on the calling thread, in the NVTX domain "memsaver", for the lifetime of the object. The
// message contains the action, the tags and the size ("pause 'weights' 15.00 GiB (16106127360
// bytes)"); the payload is only the number of bytes.
//
// Any thread, but each range is created and destroyed by one thread, innermost first. Must not
// exist under the registry's lock, because creating and destroying it runs the profiler's library,
// nor before the driver is open, because a child forked during the creation of the first range
// could wait indefinitely. Never throws: without memory for the message there is no range.
class ProfileRange {
 public:
  // `what` is a verb. `make_names` returns the tags as a std::vector<std::string>; it is called
  // only if a profiler is attached.
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
