// backup_file: a private file for backup='disk'.
//
// It has no name, so that nobody else opens it and a process that is killed leaves nothing. Where
// the file system allows it, transfers bypass the page cache; elsewhere what they leave there is
// dropped, since memory is what the backup is to save.
//
// Failures are kBackupFailed with the errno in os_error, the bytes concerned in needed_bytes, and
// where the disk is full what is free there in free_bytes. No signal of the file size limit
// (SIGXFSZ) reaches the process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace memsaver {

// Offsets, sizes and buffers are multiples of it: direct transfers ask for the block size of the
// disk, which is 512 or 4096. Anything else is kInternal.
constexpr uint64_t kFileAlignment = 4096;

// Movable. Any number of threads may transfer, reserve and punch at once on disjoint ranges. In a
// forked child it must not be used; the child's copy does not keep disk space.
class BackupFile {
 public:
  // Makes an empty file in `directory` (what the option disk_dir says); where that is empty, in the
  // first of $TMPDIR, /var/tmp and /tmp that is a directory to write to. /var/tmp comes before
  // /tmp, because that is often held in memory.
  static BackupFile create(const std::string& directory);

  BackupFile(BackupFile&& other) noexcept;
  BackupFile& operator=(BackupFile&& other) noexcept;
  ~BackupFile();

  // Takes disk space for a range, so that writing there does not find the disk full. What the range
  // holds stays; unwritten bytes read as zero. On a throw parts of the range may have space, which
  // punch gives back. Where the file system cannot reserve (NFS before 4.2, say) it is only checked
  // that so much is free now.
  void reserve(uint64_t offset, uint64_t bytes);

  // Gives back the space of a range, whose bytes then read as zero. False where the file system
  // cannot; the space then comes back with the file's end.
  bool punch(uint64_t offset, uint64_t bytes);

  // Gives back the space of all of it. No other call may be under way.
  void clear();

  // Moves all bytes or throws; then an unknown part has been moved. Reading beyond what was written
  // or reserved is an error. Buffers to read into must not be copied by a fork (MADV_DONTFORK):
  // what a direct transfer writes into a page that a child shares may be lost.
  void write(uint64_t offset, const void* from, uint64_t bytes);
  void read(uint64_t offset, void* to, uint64_t bytes);

  // Disk space held, in bytes.
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
  pid_t owner_;  // the process that made it
  std::string directory_;
  std::atomic<bool> direct_{false};
};

}  // namespace memsaver
