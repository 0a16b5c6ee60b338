// backup_file: a private file for backup='disk'.
//
// The file has no name, so that no other process can open it, and it disappears if the process is
// killed. If the file system allows it, transfers bypass the page cache; otherwise the pages that
// they leave in it are dropped, because the backup is meant to save memory.
//
// Errors: kBackupFailed, with the errno in os_error, the size of the operation in needed_bytes and,
// if the disk is full, its free space in free_bytes. The signal of the file size limit (SIGXFSZ)
// does not reach the process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace memsaver {

// Offsets, sizes and buffer addresses must be multiples of this, because direct I/O requires
// alignment to the disk's block size, which is 512 or 4096 bytes. Other values throw kInternal.
constexpr uint64_t kFileAlignment = 4096;

// Movable. Any number of threads may transfer, reserve and punch disjoint ranges concurrently. Must
// not be used in a forked child: its copy of the descriptor does not keep disk space allocated.
class BackupFile {
 public:
  // Creates an empty file in `directory` (the option disk_dir); if that is empty, in the first
  // writable directory of $TMPDIR, /var/tmp and /tmp. /var/tmp comes before /tmp, which is often in
  // memory.
  static BackupFile create(const std::string& directory);

  BackupFile(BackupFile&& other) noexcept;
  BackupFile& operator=(BackupFile&& other) noexcept;
  ~BackupFile();

  // Reserves disk space for a range, so that writes to it cannot fail for lack of space. The range
  // keeps its contents; unwritten bytes read as zero. If it throws, parts of the range may have
  // space, which punch() frees. If the file system cannot reserve space (such as NFS before 4.2),
  // only checks that enough space is free now.
  void reserve(uint64_t offset, uint64_t bytes);

  // Frees the disk space of a range; its bytes read as zero afterwards. Returns false if the file
  // system cannot punch holes; the space is then freed with the file.
  bool punch(uint64_t offset, uint64_t bytes);

  // Frees the disk space of the whole file. No other call may be in progress.
  void clear();

  // Transfers all bytes; if it throws, an unknown part has been transferred. Reading beyond the
  // written or reserved ranges is an error. Read buffers must not be inherited by a forked child
  // (MADV_DONTFORK): data that a direct transfer writes to a page shared with a child may be lost.
  void write(uint64_t offset, const void* from, uint64_t bytes);
  void read(uint64_t offset, void* to, uint64_t bytes);

  // Disk space in use, in bytes.
  uint64_t held_bytes() const noexcept;

  const std::string& directory() const { return directory_; }
  // Whether transfers bypass the page cache.
  bool direct() const { return direct_; }

 private:
  BackupFile(int file, std::string directory);
  template <typename Move>
  void transfer(const char* verb, uint64_t offset, uint64_t bytes, Move move);
  [[noreturn]] void fail(const char* verb, uint64_t bytes, int reason,
                         const std::string& detail = "") const;

  int file_ = -1;
  pid_t owner_;  // the process that created the file
  std::string directory_;
  std::atomic<bool> direct_{false};
};

}  // namespace memsaver
