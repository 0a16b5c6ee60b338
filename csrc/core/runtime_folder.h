// runtime_folder: the folder in which the processes of one user leave their sockets for each other.
//
// $XDG_RUNTIME_DIR/memsaver where that variable names a folder of this user's, else
// /tmp/memsaver-UID. It is used only if it is the user's own and nobody else can enter it: in /tmp
// somebody else may have made it first, or a link in its place.
#pragma once

#include <string>

namespace memsaver {

// Any number may be open. Not copyable: it owns a descriptor, which no program inherits.
class RuntimeFolder {
 public:
  // The first candidate that is the user's alone, made where it is missing. is_open() is false
  // where there is none, or no descriptor or host memory for it.
  RuntimeFolder() noexcept;
  ~RuntimeFolder();
  RuntimeFolder(const RuntimeFolder&) = delete;
  RuntimeFolder& operator=(const RuntimeFolder&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  // Of the folder that was checked, whatever has its name by now; for the calls on files in it
  // (unlinkat and the like), not to read from.
  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }  // without links in its last part

  // A path of a file in it that fits into a socket's address, however long path() is. Valid in this
  // process, while this object lives.
  std::string short_path(const std::string& name) const;

 private:
  bool try_open(const std::string& path);

  int descriptor_ = -1;
  std::string path_;
};

}  // namespace memsaver
