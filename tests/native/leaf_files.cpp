// The cases for the backup file, and replacements for the system calls that it makes.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "core/backup/backup_file.h"
#include "core/platform/workers.h"
#include "native/leaf.h"

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Buffer {
  explicit Buffer(uint64_t bytes)
      : bytes(bytes),
        start(static_cast<unsigned char*>(std::aligned_alloc(kFileAlignment, bytes))) {}
  ~Buffer() { std::free(start); }
  // Fills the buffer with contents that depend on the offset in the file.
  void fill(uint64_t offset) {
    for (uint64_t i = 0; i < bytes; ++i) start[i] = byte_at(offset + i);
  }
  bool is(uint64_t offset) const {
    for (uint64_t i = 0; i < bytes; ++i) {
      if (start[i] != byte_at(offset + i)) return false;
    }
    return true;
  }
  bool is_zero() const {
    for (uint64_t i = 0; i < bytes; ++i) {
      if (start[i] != 0) return false;
    }
    return true;
  }
  static unsigned char byte_at(uint64_t place) {
    return static_cast<unsigned char>(place * 7 + place / 4096 * 13 + 1);
  }
  uint64_t bytes;
  unsigned char* start;
};

// Returns the descriptor of the only unnamed file that this process has open.
int unnamed_file() {
  for (int file = 3; file < 100; ++file) {
    struct stat facts;
    if (fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_nlink == 0) return file;
  }
  throw std::runtime_error("there is no unnamed file");
}

std::string entries_of(const std::string& directory) {
  std::string names;
  DIR* const folder = opendir(directory.c_str());
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.' || entry->d_name[1] == 'm') names += entry->d_name;
  }
  closedir(folder);
  return names;
}

std::string held(const BackupFile& file) { return std::to_string(file.held_bytes() / kMiB); }

// Eight threads write and read disjoint pieces; then some of the space is released.
void file_round_trip(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  struct stat facts;
  fstat(unnamed_file(), &facts);
  char link[4096] = {};
  if (readlink(("/proc/self/fd/" + std::to_string(unnamed_file())).c_str(), link, 4095) < 0) return;
  std::printf("mode %o links %d close on exec %d, entries '%s', %s\n", facts.st_mode & 07777,
              static_cast<int>(facts.st_nlink), fcntl(unnamed_file(), F_GETFD) & FD_CLOEXEC,
              entries_of(arguments[0]).c_str(),
              std::string(link).find("(deleted)") != std::string::npos ? "deleted" : "there");
  const bool at_first = file.direct();
  constexpr uint64_t kPiece = kMiB + kFileAlignment, kThreads = 8;
  file.reserve(0, kThreads * kPiece);
  say("held " + held(file));
  std::atomic<int> wrong{0};
  run_in_parallel(kThreads, [&](size_t index) {
    const uint64_t offset = (kThreads - 1 - index) * kPiece;
    Buffer out(kPiece), in(kPiece);
    out.fill(offset);
    file.write(offset, out.start, kPiece);
    file.read(offset, in.start, kPiece);
    wrong += !in.is(offset);
  });
  Buffer all(kThreads * kPiece);
  file.read(0, all.start, all.bytes);
  wrong += !all.is(0);
  file.reserve(0, all.bytes);  // changes nothing
  BackupFile moved = BackupFile::create(arguments[0]);
  moved = std::move(file);
  moved.read(0, all.start, all.bytes);
  wrong += !all.is(0);
  say("wrong " + std::to_string(wrong) + " held " + held(moved));
  const bool punched = moved.punch(0, kMiB * 4);
  Buffer part(kMiB * 4), rest(kMiB * 4);
  moved.read(0, part.start, part.bytes);
  moved.read(kMiB * 4, rest.start, rest.bytes);
  say(punched ? "punched: " + std::string(part.is_zero() && rest.is(kMiB * 4) ? "right" : "wrong") +
                    " held " + held(moved)
              : "not punched: " + std::string(part.is(0) ? "right" : "wrong"));
  if (at_first != moved.direct()) say("it is no longer direct");
  std::fprintf(stdout, "direct %d\n", moved.direct());
}

// Destroying the file releases its space even if another descriptor is open; in a child, it does
// not.
void file_fork(const Arguments& arguments) {
  auto file = std::make_unique<BackupFile>(BackupFile::create(arguments[0]));
  Buffer out(kMiB), in(kMiB);
  out.fill(0);
  file->write(0, out.start, out.bytes);
  const int as_in_a_child = dup(unnamed_file());
  const pid_t child = fork();
  if (child == 0) {
    file.reset();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  file->read(0, in.start, in.bytes);
  say(in.is(0) ? "the contents are there" : "the child took the contents");
  file.reset();
  struct stat facts;
  fstat(as_in_a_child, &facts);
  say("blocks left " + std::to_string(facts.st_blocks));
}

void file_short(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  Buffer buffer(kMiB);
  buffer.fill(0);
  attempt([&] { file.read(0, buffer.start, buffer.bytes); });
  file.write(0, buffer.start, buffer.bytes);
  if (ftruncate(unnamed_file(), 700000) != 0) say("not cut");
  attempt([&] { file.read(0, buffer.start, buffer.bytes); });
}

void file_misuse(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  Buffer buffer(2 * kFileAlignment);
  attempt([&] { file.write(1, buffer.start, 4096); });
  attempt([&] { file.write(0, buffer.start + 1, 4096); });
  attempt([&] { file.read(0, buffer.start, 4097); });
  attempt([&] { file.reserve(4096, UINT64_MAX - 4095); });
  attempt([&] { file.punch(512, 4096); });
  file.write(0, buffer.start, 0);
  file.read(0, buffer.start, 0);
  file.reserve(0, 0);
  say(std::to_string(file.held_bytes()));
}

// Exceeds the file size limit, with the signal's default handler as in an unprepared program.
void file_limit(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  const rlimit most{kMiB, RLIM_INFINITY};
  setrlimit(RLIMIT_FSIZE, &most);
  signal(SIGXFSZ, SIG_DFL);
  Buffer buffer(2 * kMiB);
  attempt([&] { file.reserve(0, buffer.bytes); });
  attempt([&] { file.write(0, buffer.start, buffer.bytes); });
  attempt([&] { file.write(kMiB, buffer.start, kMiB); });
  attempt([&] { file.write(0, buffer.start, kMiB); });
  sigset_t set;
  pthread_sigmask(SIG_SETMASK, nullptr, &set);
  const int blocked = sigismember(&set, SIGXFSZ);
  sigpending(&set);
  say("blocked " + std::to_string(blocked) + " pending " +
      std::to_string(sigismember(&set, SIGXFSZ)));
}

// Fills a disk of 4 MiB.
void file_full(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  Buffer buffer(2 * kMiB), in(2 * kMiB);
  buffer.fill(0);
  file.reserve(0, buffer.bytes);
  file.write(0, buffer.start, buffer.bytes);
  attempt([&] { file.reserve(2 * kMiB, 4 * kMiB); });
  file.punch(2 * kMiB, 4 * kMiB);
  file.read(0, in.start, in.bytes);
  say(in.is(0) ? "what was there stays" : "what was there is lost");
  say("held " + held(file));
  file.write(2 * kMiB, buffer.start, kMiB);
  attempt([&] { file.write(3 * kMiB, buffer.start, 2 * kMiB); });
}

void file_reserve(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  attempt([&] {
    file.reserve(0, number(arguments[1]));
    say("held " + std::to_string(file.held_bytes()));
  });
}

void file_write(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  Buffer buffer(number(arguments[1]));
  attempt([&] { file.write(0, buffer.start, buffer.bytes); });
}

// Prints the number of the file's pages in the page cache after it was written and read.
void file_cache(const Arguments& arguments) {
  BackupFile file = BackupFile::create(arguments[0]);
  Buffer buffer(8 * kMiB);
  file.write(0, buffer.start, buffer.bytes);
  file.read(0, buffer.start, buffer.bytes);
  void* const view = mmap(nullptr, buffer.bytes, PROT_READ, MAP_SHARED, unnamed_file(), 0);
  std::vector<unsigned char> present(buffer.bytes / 4096);
  mincore(view, buffer.bytes, present.data());
  say("cached " + std::to_string(std::count(present.begin(), present.end(), 1)));
}

void file_directory(const Arguments& arguments) {
  attempt([&] { say(BackupFile::create(arguments[0]).directory()); });
}

}  // namespace

const Cases kFileCases = {
    {"file_directory", file_directory},
    {"file_cache", file_cache},
    {"file_reserve", file_reserve},
    {"file_write", file_write},
    {"file_fork", file_fork},
    {"file_full", file_full},
    {"file_limit", file_limit},
    {"file_misuse", file_misuse},
    {"file_round_trip", file_round_trip},
    {"file_short", file_short},
};

// Replacements for libc's functions that simulate a system without the features in LEAF_SYSTEM.

namespace {

bool lacks(const char* what) {
  const char* const list = std::getenv("LEAF_SYSTEM");
  return list && std::strstr(list, what);
}

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// Limits transfers to two blocks, and interrupts every third of them.
bool interrupted(size_t* bytes) {
  static std::atomic<int> calls{0};
  if (!lacks("patience")) return false;
  *bytes = std::min<size_t>(*bytes, 2 * kFileAlignment);
  errno = EINTR;
  return ++calls % 3 == 0;
}

}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  if ((flags & O_TMPFILE) == O_TMPFILE && lacks("unnamed files")) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return real<int (*)(const char*, int, ...)>("open")(path, flags, mode);
}

extern "C" int fcntl(int file, int command, ...) {
  va_list rest;
  va_start(rest, command);
  const long argument = va_arg(rest, long);
  va_end(rest);
  if (command == F_SETFL && (argument & O_DIRECT) && lacks("direct transfers")) {
    errno = EINVAL;
    return -1;
  }
  return real<int (*)(int, int, ...)>("fcntl")(file, command, argument);
}

extern "C" int fallocate(int file, int mode, off_t offset, off_t bytes) {
  if (lacks("reservations")) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return real<int (*)(int, int, off_t, off_t)>("fallocate")(file, mode, offset, bytes);
}

extern "C" ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
  if (interrupted(&bytes)) return -1;
  if (lacks("a good disk")) {
    errno = EIO;
    return -1;
  }
  return real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite")(file, from, bytes, offset);
}

extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  if (interrupted(&bytes)) return -1;
  const bool direct = fcntl(file, F_GETFL) & O_DIRECT;
  if (direct && lacks("direct reads")) {
    errno = EINVAL;
    return -1;
  }
  return real<ssize_t (*)(int, void*, size_t, off_t)>("pread")(file, to, bytes, offset);
}
