#include "core/platform/runtime_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

namespace memsaver {
namespace {

// Returns $XDG_RUNTIME_DIR if it is this user's folder, otherwise "".
std::string runtime_dir() {
  const char* const directory = secure_getenv("XDG_RUNTIME_DIR");
  struct stat facts;
  if (!directory || directory[0] != '/' || stat(directory, &facts) != 0) return "";
  return S_ISDIR(facts.st_mode) && facts.st_uid == geteuid() ? directory : "";
}

}  // namespace

RuntimeFolder::RuntimeFolder() noexcept {
  try {
    const std::string runtime = runtime_dir();
    if (!runtime.empty() && try_open(runtime + "/memsaver")) return;
    try_open("/tmp/memsaver-" + std::to_string(geteuid()));
  } catch (...) {
  }
}

RuntimeFolder::~RuntimeFolder() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool RuntimeFolder::try_open(const std::string& path) {
  path_ = path;
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return false;
  const int folder = open(path.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder < 0) return false;
  struct stat facts;
  const bool is_private = fstat(folder, &facts) == 0 && facts.st_uid == geteuid() &&
                          (facts.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO)) == S_IRWXU;
  if (!is_private) {
    close(folder);
    return false;
  }
  descriptor_ = folder;
  return true;
}

std::string RuntimeFolder::short_path(const std::string& name) const {
  return "/proc/self/fd/" + std::to_string(descriptor_) + "/" + name;
}

}  // namespace memsaver
