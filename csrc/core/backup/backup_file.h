// backup_file: a private file for backup='disk'.
//
// The file has no name, so no other process can open it, and the file disappears if the process is
// killed. If the file system allows direct I/O, transfers bypass the page cache. Otherwise, the
// pages that transfers leave in the page cache are dropped, because the purpose of the backup is to
// save memory.
//
// Errors: kBackupFailed, with the errno in os_error, the size of the operation in needed_bytes and,
// if the disk is full, the disk's free space in free_bytes. SIGXFSZ, the signal for the file size
// limit, does not reach the process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace memsaver {

// Offsets, sizes and buffer addresses must be multiples of this number, because direct I/O requires
// alignment to the disk's block size, which is 512 or 4096 bytes. Functions throw kInternal for
// other values.
constexpr uint64_t kFileAlignment = 4096;

// Movable. Any number of threads may transfer, reserve and punch disjoint ranges concurrently. A
// BackupFile must not be used in a forked child, because the child's copy of the descriptor does
// not keep disk space allocated.
class BackupFile {
 public:
  // Creates an empty file in `directory` (the value of option disk_dir). If `directory` is empty,
  // creates the file in the first writable directory of $TMPDIR, /var/tmp and /tmp. /var/tmp
  // precedes /tmp because /tmp is often in memory.
  static BackupFile create(const std::string& directory);

  BackupFile(BackupFile&& other) noexcept;
  BackupFile& operator=(BackupFile&& other) noexcept;
  ~BackupFile();

  // Reserves disk space for a range, so that writes to it cannot fail for lack of space. The range
  // keeps its contents; unwritten bytes read as zero. If reserve() throws, parts of the range may
  // already have space, which punch() frees. If the file system cannot reserve space (for example,
  // NFS before 4.2), reserve() only checks that enough space is currently free.
  void reserve(uint64_t offset, uint64_t bytes);

  // Frees the disk space of a range; its bytes read as zero afterwards. Returns false if the file
  // system cannot punch holes; in that case, the space is freed together with the file.
  bool punch(uint64_t offset, uint64_t bytes);

  // Frees the disk space of the whole file. No other call may be in progress.
  void clear();

  // These functions transfer all bytes. If they throw, any part of the bytes may have been
  // transferred. Reading beyond the written or reserved ranges is an error. Forked children must
  // not inherit read buffers (use MADV_DONTFORK), because a direct transfer into a page that is
  // shared with a child can lose data.
  void write(uint64_t offset, const void* from, uint64_t bytes);
  void read(uint64_t offset, void* to, uint64_t bytes);

  // Returns the disk space in use, in bytes.
  uint64_t held_bytes() const noexcept;

  const std::string& directory() const { return directory_; }
  // Returns whether transfers bypass the page cache.
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
