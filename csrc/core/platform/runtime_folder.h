// runtime_folder: the folder for the sockets of one user's processes.
//
// The path is $XDG_RUNTIME_DIR/memsaver if that variable names a folder of this user, otherwise
// /tmp/memsaver-UID. The folder is used only if it belongs to the user and no other user can access
// it, because another user may have created the folder, or a link with the same name, in /tmp.
#pragma once

#include <string>

namespace memsaver {

// Owns a descriptor of the folder, which is closed on exec. Not copyable. Any number of objects may
// exist.
class RuntimeFolder {
 public:
  // Opens the first candidate folder that only the user can access, and creates the folder if it is
  // missing. is_open() is false if no candidate is usable, or if not enough descriptors or host
  // memory are available.
  RuntimeFolder() noexcept;
  ~RuntimeFolder();
  RuntimeFolder(const RuntimeFolder&) = delete;
  RuntimeFolder& operator=(const RuntimeFolder&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  // The descriptor of the checked folder, even if the path has been replaced since the check. Use
  // the descriptor for calls on files in the folder (such as unlinkat), not for reading.
  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }  // its last component is not a link

  // Returns a path to the file `name` in the folder that fits into a socket's address, regardless
  // of the length of path(). The returned path is valid only in this process and while this object
  // exists.
  std::string short_path(const std::string& name) const;

 private:
  bool try_open(const std::string& path);

  int descriptor_ = -1;
  std::string path_;
};

}  // namespace memsaver
