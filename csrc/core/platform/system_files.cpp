#include "core/platform/system_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <sstream>

namespace memsaver {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool lists(const std::string& names, const std::string& name) {
  return ("," + names + ",").find("," + name + ",") != std::string::npos;
}

// proc(5): mountinfo escapes spaces, tabs, newlines and backslashes in paths as three octal digits.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// A file descriptor that is open for reading, or -1 if the file could not be opened.
class OpenFile {
 public:
  explicit OpenFile(const char* path) : number_(open(path, O_RDONLY | O_CLOEXEC)) {}
  ~OpenFile() {
    if (number_ >= 0) close(number_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int number() const { return number_; }

 private:
  const int number_;
};

// A mounted control group hierarchy.
struct Mount {
  std::string root;   // the group at the mount point; "/" for the root of a hierarchy or namespace
  std::string point;  // the mount point
  bool unified;
};

// Returns the mounts that have `controller`, or all of version 2. cgroups(7),
// proc_pid_mountinfo(5).
std::vector<Mount> mounts_of(const std::string& controller) {
  std::vector<Mount> mounts;
  for (const std::string& line :
       split(read_system_file("/proc/self/mountinfo").value_or(""), '\n')) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::vector<std::string> before = split(line.substr(0, dash), ' ');
    const std::vector<std::string> after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const bool unified = after[0] == "cgroup2";
    if (!unified && (after[0] != "cgroup" || !lists(after[2], controller))) continue;
    mounts.push_back({unescaped(before[3]), unescaped(before[4]), unified});
  }
  return mounts;
}

// Returns the path of `group` below `root`, "" for the root itself. Returns nothing for a group
// that lies elsewhere (a process that was moved out of its namespace, or a container that shows a
// path of its host).
std::optional<std::string> below(const std::string& root, const std::string& group) {
  if (group.find("/..") == 0) return std::nullopt;
  if (root == "/") return group == "/" ? "" : group;
  if (group == root) return "";
  if (group.compare(0, root.size() + 1, root + "/") == 0) return group.substr(root.size());
  return std::nullopt;
}

void add_levels(const std::vector<Mount>& mounts, bool unified, const std::string& group,
                std::vector<Cgroup>& found) {
  const Mount* chosen = nullptr;
  std::string path;
  for (const Mount& mount : mounts) {
    if (mount.unified != unified) continue;
    const std::optional<std::string> inside = below(mount.root, group);
    if (!chosen || inside) {
      chosen = &mount;
      path = inside.value_or("");
    }
    if (inside) break;
  }
  if (!chosen) return;
  for (;;) {
    found.push_back({chosen->point + path, unified});
    if (path.empty()) return;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

std::optional<std::string> read_system_file(const std::string& path) {
  const char* const root = secure_getenv("MEMSAVER_TEST_SYSTEM_ROOT");
  const OpenFile file(((root ? root : "") + path).c_str());
  if (file.number() < 0) return std::nullopt;
  std::string text;
  char part[4096];
  ssize_t got;
  while ((got = ::read(file.number(), part, sizeof(part))) > 0 || (got < 0 && errno == EINTR)) {
    if (got > 0) text.append(part, static_cast<size_t>(got));
  }
  if (got < 0) return std::nullopt;
  text.erase(text.find_last_not_of(" \t\n") + 1);
  return text;
}

bool is_out_of_descriptors() {
  const int file = open("/", O_PATH | O_CLOEXEC);
  if (file < 0) return errno == EMFILE || errno == ENFILE;
  close(file);
  return false;
}

std::optional<uint64_t> number_after(const std::string& text, const std::string& key) {
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const char* rest = line.c_str() + key.size();
    if (*rest != ' ' && *rest != ':' && *rest != '\t') continue;
    rest += *rest == ':';
    char* end = nullptr;
    const uint64_t number = std::strtoull(rest, &end, 10);
    if (end != rest) return number;
  }
  return std::nullopt;
}

std::optional<std::string> Cgroup::read(const char* file) const {
  return read_system_file(directory + "/" + file);
}

std::optional<uint64_t> Cgroup::number(const char* file) const {
  const std::optional<std::string> text = read(file);
  if (!text || text->empty() || (*text)[0] < '0' || (*text)[0] > '9') return std::nullopt;
  return std::strtoull(text->c_str(), nullptr, 10);
}

std::vector<Cgroup> cgroups_of(const std::string& controller) {
  std::vector<Cgroup> found;
  const std::vector<Mount> mounts = mounts_of(controller);
  for (const std::string& line : split(read_system_file("/proc/self/cgroup").value_or(""), '\n')) {
    // hierarchy:controllers:path, version 2 has hierarchy 0 and no controllers
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && !lists(controllers, controller)) continue;
    add_levels(mounts, unified, line.substr(second + 1), found);
  }
  return found;
}

}  // namespace memsaver
