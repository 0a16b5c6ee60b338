// system_files: reads /proc and /sys.
//
// Files are read anew each time, because limits change while a process runs. An unreadable file
// counts as absent, never as an error. Any thread; calls open files, so not under the registry's
// lock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace memsaver {

// Returns the text of a system file without trailing white space. The environment variable
// MEMSAVER_TEST_SYSTEM_ROOT, for tests only, names a directory that replaces the root of /proc and
// /sys.
std::optional<std::string> read_system_file(const std::string& path);

// Returns whether this process, or the system, has no file descriptor left.
bool is_out_of_descriptors();

// Returns the number after `key` in a file of lines "key number" or "key: number".
std::optional<uint64_t> number_after(const std::string& text, const std::string& key);

// A control group that includes this process, directly or through an ancestor.
struct Cgroup {
  std::string directory;  // the directory of its files, such as /sys/fs/cgroup/memory/job
  bool unified;           // whether it belongs to version 2

  std::optional<std::string> read(const char* file) const;
  // Returns the number in a file; nothing if the file contains "max" or a negative number.
  std::optional<uint64_t> number(const char* file) const;
};

// Returns the control groups that limit this process through `controller` ("memory", "cpu"): its
// own and every visible ancestor, in both versions. In a container, its own group is the highest
// visible one.
std::vector<Cgroup> cgroups_of(const std::string& controller);

}  // namespace memsaver
