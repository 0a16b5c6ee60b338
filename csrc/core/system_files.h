// system_files: what /proc and /sys say about this process.
//
// Asked anew each time, because limits change while a process runs. A file that cannot be read says
// nothing: that is never an error. Any thread; a call opens files, so not under the registry lock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace memsaver {

// The text of a file of the system, without the white space at its end. The environment variable
// MEMSAVER_TEST_SYSTEM_ROOT, which is for tests only, names a directory in which to look for
// /proc and /sys instead.
std::optional<std::string> read_system_file(const std::string& path);

// Whether this process, or the system, has no descriptor left to read such files by.
bool is_out_of_descriptors();

// The number behind `key` in a file of lines "key number" or "key: number".
std::optional<uint64_t> number_after(const std::string& text, const std::string& key);

// One control group that this process is in, by its own choice or an ancestor's.
struct Cgroup {
  std::string directory;  // where its files are, such as /sys/fs/cgroup/memory/job
  bool unified;           // version 2

  std::optional<std::string> read(const char* file) const;
  // The number in a file that holds one; nothing where it says "max" or a negative number.
  std::optional<uint64_t> number(const char* file) const;
};

// The control groups of this process that `controller` ("memory", "cpu") may limit it by: its own,
// and every ancestor as far up as this process can see, in both versions. A container sees its own
// group as the highest; groups above it do not appear.
std::vector<Cgroup> cgroups_of(const std::string& controller);

}  // namespace memsaver
