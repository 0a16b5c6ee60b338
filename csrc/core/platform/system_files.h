// system_files: reads /proc and /sys.
//
// Files are read again at every call, because limits can change while a process runs. An unreadable
// file counts as absent and does not cause an error. Any thread may call these functions, but not
// under the registry's lock, because they open files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace memsaver {

// Returns the text of a system file without trailing white space. In tests only, the environment
// variable MEMSAVER_TEST_SYSTEM_ROOT names a directory that replaces the root of /proc and /sys.
std::optional<std::string> read_system_file(const std::string& path);

// Returns whether this process or the system has run out of file descriptors.
bool is_out_of_descriptors();

// Returns the number that follows `key` in `text`, whose lines have the form "key number" or "key:
// number".
std::optional<uint64_t> number_after(const std::string& text, const std::string& key);

// A control group that contains this process directly or through a descendant group.
struct Cgroup {
  std::string directory;  // the directory of its files, such as /sys/fs/cgroup/memory/job
  bool unified;           // whether the group belongs to version 2

  std::optional<std::string> read(const char* file) const;
  // Returns the number in a file, or no value if the file contains "max" or a negative number.
  std::optional<uint64_t> number(const char* file) const;
};

// Returns the control groups that limit this process through `controller` ("memory", "cpu"): the
// process's own group and every visible ancestor, in both versions of control groups. In a
// container, the process's own group is the highest visible group.
std::vector<Cgroup> cgroups_of(const std::string& controller);

}  // namespace memsaver
