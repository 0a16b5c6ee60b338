#include "core/backup/backup_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "core/platform/status.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

// Returns the free bytes for this user in the file system of `directory`, if it reports them.
std::optional<uint64_t> free_bytes_of(const std::string& directory) {
  struct statvfs facts;
  if (statvfs(directory.c_str(), &facts) != 0) return std::nullopt;
  return static_cast<uint64_t>(facts.f_bavail) * facts.f_frsize;
}

[[noreturn]] void fail_in(const std::string& directory, const std::string& what, uint64_t bytes,
                          int reason, const std::string& detail) {
  const bool full = reason == ENOSPC || reason == EDQUOT;
  const uint64_t free = full ? free_bytes_of(directory).value_or(0) : 0;
  std::string text = what + " in " + quoted(directory) +
                     " failed: " + (detail.empty() ? std::strerror(reason) : detail);
  if (full) text += " (" + format_bytes(free) + " are free); free disk space there";
  if (reason == EFBIG) text += "; raise the limit of file sizes (ulimit -f)";
  if (reason == EMFILE) text += "; close files or raise the limit of open files (ulimit -n)";
  text += full || reason == EFBIG || reason == EMFILE ? ", or choose" : "; choose";
  text += " another directory with disk_dir (MEMSAVER_DISK_DIR), or backup='host'";
  Error error(Status::kBackupFailed, text);
  error.needed_bytes = bytes;
  error.free_bytes = free;
  error.os_error = reason;
  throw error;
}

bool holds_files(const std::string& directory) {
  struct stat facts;
  return stat(directory.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) &&
         faccessat(AT_FDCWD, directory.c_str(), W_OK | X_OK, AT_EACCESS) == 0;
}

std::string default_directory() {
  const char* const directory = secure_getenv("TMPDIR");
  for (const std::string& candidate :
       {std::string(directory ? directory : ""), std::string("/var/tmp")}) {
    if (holds_files(candidate)) return candidate;
  }
  return "/tmp";
}

// Returns the descriptor of an empty file that only its owner may use and that no directory lists,
// or -1 with errno.
int open_unnamed(const std::string& directory) {
  // O_EXCL: the file can never be linked to a name.
  const int file = open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = directory + "/.memsaver-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

// Blocks and discards SIGXFSZ, which a write beyond the file size limit raises in its thread.
class SizeSignalHeld {
 public:
  SizeSignalHeld() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~SizeSignalHeld() {
    const int reason = errno;
    const timespec now{0, 0};
    if (!was_pending_) {
      while (sigtimedwait(&signal_, nullptr, &now) < 0 && errno == EINTR) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = reason;
  }
  SizeSignalHeld(const SizeSignalHeld&) = delete;
  SizeSignalHeld& operator=(const SizeSignalHeld&) = delete;

 private:
  sigset_t signal_, before_;
  bool was_pending_;
};

// Calls fallocate, retrying while signals interrupt it. Returns the errno, or 0.
int allocate(int file, int mode, uint64_t offset, uint64_t bytes) {
  const SizeSignalHeld held;
  while (fallocate(file, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

void require_aligned(uint64_t offset, uint64_t bytes, const void* buffer = nullptr) {
  const uint64_t address = reinterpret_cast<uint64_t>(buffer);
  if ((offset | bytes | address) % kFileAlignment == 0 && bytes <= INT64_MAX &&
      offset <= INT64_MAX - bytes)
    return;
  throw Error(Status::kInternal,
              "a transfer of " + std::to_string(bytes) + " bytes at offset " +
                  std::to_string(offset) +
                  " of a backup file is not aligned to 4096 bytes, or too large");
}

}  // namespace

BackupFile BackupFile::create(const std::string& directory) {
  std::string chosen = directory.empty() ? default_directory() : directory;
  const int file = open_unnamed(chosen);
  if (file < 0) fail_in(chosen, "creating a backup file", 0, errno, "");
  // No allocation may fail before the file has an owner.
  return BackupFile(file, std::move(chosen));
}

BackupFile::BackupFile(int file, std::string directory)
    : file_(file), owner_(getpid()), directory_(std::move(directory)) {
  const int flags = fcntl(file_, F_GETFL);
  direct_ = flags != -1 && fcntl(file_, F_SETFL, flags | O_DIRECT) == 0;
}

BackupFile::BackupFile(BackupFile&& other) noexcept
    : file_(std::exchange(other.file_, -1)),
      owner_(other.owner_),
      directory_(std::move(other.directory_)),
      direct_(other.direct_.load()) {}

BackupFile& BackupFile::operator=(BackupFile&& other) noexcept {
  BackupFile taken(std::move(other));
  std::swap(file_, taken.file_);
  std::swap(owner_, taken.owner_);
  directory_.swap(taken.directory_);
  direct_ = taken.direct_.load();
  return *this;
}

BackupFile::~BackupFile() {
  if (file_ < 0) return;
  // A forked child may have the file open: without this call, the child would keep the space
  // allocated.
  if (owner_ == getpid() && ftruncate(file_, 0) != 0) {
    // The space is then freed with the last descriptor.
  }
  close(file_);
}

void BackupFile::fail(const char* verb, uint64_t bytes, int reason,
                      const std::string& detail) const {
  fail_in(directory_, std::string(verb) + " the " + format_bytes(bytes) + " of a backup's file",
          bytes, reason, detail);
}

void BackupFile::reserve(uint64_t offset, uint64_t bytes) {
  require_aligned(offset, bytes);
  if (bytes == 0) return;
  int reason = allocate(file_, 0, offset, bytes);
  if (reason == EOPNOTSUPP || reason == ENOSYS) {
    // If the free space is unknown, a full disk is reported by the writes.
    reason = free_bytes_of(directory_).value_or(bytes) < bytes ? ENOSPC : 0;
  }
  if (reason != 0) fail("reserving", bytes, reason);
}

bool BackupFile::punch(uint64_t offset, uint64_t bytes) {
  require_aligned(offset, bytes);
  if (bytes == 0) return true;
  const int reason = allocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  if (reason == EOPNOTSUPP || reason == ENOSYS) return false;
  if (reason != 0) fail("releasing", bytes, reason);
  return true;
}

void BackupFile::clear() {
  while (ftruncate(file_, 0) != 0) {
    if (errno != EINTR) fail("releasing", held_bytes(), errno);
  }
}

uint64_t BackupFile::held_bytes() const noexcept {
  struct stat facts;
  if (fstat(file_, &facts) != 0) return 0;
  return static_cast<uint64_t>(facts.st_blocks) * 512;  // stat(2): in units of 512 bytes
}

template <typename Move>
void BackupFile::transfer(const char* verb, uint64_t offset, uint64_t bytes, Move move) {
  uint64_t done = 0;
  while (done < bytes) {
    const bool direct = direct_;
    const ssize_t moved = move(done, bytes - done, static_cast<off_t>(offset + done));
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
    } else if (moved == 0) {
      fail(verb, bytes, EIO,
           "the file ends after " + std::to_string(done) +
               " of these bytes; it was cut, or the "
               "range was never written");
    } else if (errno == EINVAL && direct) {
      // The file system accepts O_DIRECT but not this transfer: its block size is larger, or a
      // short transfer left an unaligned remainder.
      const int flags = fcntl(file_, F_GETFL);
      if (flags == -1 || fcntl(file_, F_SETFL, flags & ~O_DIRECT) != 0) fail(verb, bytes, EINVAL);
      direct_ = false;
    } else if (errno != EINTR) {
      fail(verb, bytes, errno);
    }
  }
}

void BackupFile::write(uint64_t offset, const void* from, uint64_t bytes) {
  require_aligned(offset, bytes, from);
  const SizeSignalHeld held;
  transfer("writing", offset, bytes, [&](uint64_t done, uint64_t left, off_t at) {
    return pwrite(file_, static_cast<const char*>(from) + done, left, at);
  });
  if (direct_ || bytes == 0) return;
  // Only pages already on disk can be dropped, and a disk error may surface only here.
  constexpr unsigned kWhole =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  while (sync_file_range(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes), kWhole)) {
    if (errno == ENOSYS) break;
    if (errno != EINTR) fail("writing", bytes, errno);
  }
  posix_fadvise(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

void BackupFile::read(uint64_t offset, void* to, uint64_t bytes) {
  require_aligned(offset, bytes, to);
  transfer("reading", offset, bytes, [&](uint64_t done, uint64_t left, off_t at) {
    return pread(file_, static_cast<char*>(to) + done, left, at);
  });
  if (direct_ || bytes == 0) return;
  posix_fadvise(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

}  // namespace memsaver
