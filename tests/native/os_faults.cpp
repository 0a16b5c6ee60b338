// os_faults: a preloaded library that makes one library's calls to the operating system fail.
//
// A call belongs to the library if it returns into the library's code (os_faults_watch chooses the
// library). malloc includes operator new, because the library contains its own C++ runtime, which
// calls malloc. Calls are counted from 0 in order of arrival, over all threads. A fault makes a
// call do nothing and report an error number, with two exceptions: kShort does half of a transfer,
// and a failed close() closes the file nevertheless, as on Linux.
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

extern "C" void* __libc_malloc(size_t bytes);  // dlsym() may allocate

namespace {

constexpr int kShort = -1;

enum Kind {
  kMmap,
  kMunmap,
  kMadvise,
  kMbind,
  kOpen,
  kOpenUnnamed,  // open() with O_TMPFILE
  kMkostemp,
  kFcntl,
  kFstat,
  kStatvfs,
  kFallocate,
  kPread,
  kPwrite,
  kRead,
  kSyncFileRange,
  kFadvise,
  kFtruncate,
  kClose,
  kPthreadCreate,
  kMalloc,
  kKinds
};

constexpr const char* kNames[kKinds] = {
    "mmap",          "munmap",    "madvise", "mbind",          "open",
    "open_unnamed",  "mkostemp",  "fcntl",   "fstat",          "statvfs",
    "fallocate",     "pread",     "pwrite",  "read",           "sync_file_range",
    "posix_fadvise", "ftruncate", "close",   "pthread_create", "malloc"};

struct Fault {
  std::atomic<uint64_t> first{UINT64_MAX};  // the number of a call
  std::atomic<uint64_t> end{0};
  std::atomic<int> code{0};

  bool hits(uint64_t call) const { return call >= first && call < end; }
};

struct Call {
  std::atomic<uint64_t> calls{0};
  Fault fault;     // set by os_faults_set
  Fault standing;  // set by os_faults_stand
};

Call calls[kKinds];
std::atomic<uint64_t> fired{0};
std::atomic<int64_t> mapped_bytes{0};
std::atomic<uintptr_t> code_begin{0}, code_end{0};

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool is_watched(const void* caller) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(caller);
  return at >= code_begin && at < code_end;
}

// Counts a call by the library; returns the error number with which it must fail, or 0.
int count(Kind kind, const void* caller) {
  if (!is_watched(caller)) return 0;
  const uint64_t call = calls[kind].calls++;
  if (calls[kind].fault.hits(call)) {
    ++fired;
    return calls[kind].fault.code;
  }
  return calls[kind].standing.hits(call) ? calls[kind].standing.code.load() : 0;
}

Kind find(const char* name) {
  int kind = 0;
  while (kind < kKinds && std::strcmp(kNames[kind], name) != 0) ++kind;
  return static_cast<Kind>(kind);
}

int refuse(int code) {
  errno = code;
  return -1;
}

}  // namespace

#define CALLER __builtin_return_address(0)
// Returns the real function, looked up once: `REAL(munmap)(start, bytes)`.
#define REAL(name)                                               \
  ([] {                                                          \
    static const auto function = next<decltype(&::name)>(#name); \
    return function;                                             \
  }())

extern "C" {

// --- the controls

// Watches the library whose file name ends with `suffix`. Returns 0, or -1 if it is not loaded.
int os_faults_watch(const char* suffix) {
  struct Search {
    const char* suffix;
    bool found;
  } search{suffix, false};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Search* const wanted = static_cast<Search*>(data);
        const size_t length = std::strlen(info->dlpi_name), tail = std::strlen(wanted->suffix);
        if (length < tail || std::strcmp(info->dlpi_name + length - tail, wanted->suffix) != 0) {
          return 0;
        }
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
          code_begin = info->dlpi_addr + part.p_vaddr;
          code_end = code_begin + part.p_memsz;
        }
        wanted->found = true;
        return 1;
      },
      &search);
  return search.found ? 0 : -1;
}

// Makes the nth call from now (1: the next) and the times - 1 after it (0: all) fail with `code`.
// Each name has one fault at a time. Returns 0, or -1 for an unknown name.
int os_faults_set(const char* name, uint64_t nth, int code, uint64_t times) {
  const Kind kind = find(name);
  if (kind == kKinds || nth == 0) return -1;
  Fault& fault = calls[kind].fault;
  fault.code = code;
  fault.end = times == 0 ? UINT64_MAX : calls[kind].calls + nth - 1 + times;
  fault.first = calls[kind].calls + nth - 1;
  return 0;
}

// Makes every call of that name fail with `code` until the process ends; faults of os_faults_set
// take precedence.
int os_faults_stand(const char* name, int code) {
  const Kind kind = find(name);
  if (kind == kKinds) return -1;
  calls[kind].standing.code = code;
  calls[kind].standing.end = UINT64_MAX;
  calls[kind].standing.first = 0;
  return 0;
}

// Clears the faults of os_faults_set; returns how many calls they made fail since the last clear.
uint64_t os_faults_clear(void) {
  for (Call& call : calls) call.fault.first = UINT64_MAX;
  return fired.exchange(0);
}

// Returns the number of calls so far; UINT64_MAX for an unknown name.
uint64_t os_faults_calls(const char* name) {
  const Kind kind = find(name);
  return kind == kKinds ? UINT64_MAX : calls[kind].calls.load();
}

// Returns the name of the call with this number, or null past the end.
const char* os_faults_name(int number) {
  return number >= 0 && number < kKinds ? kNames[number] : nullptr;
}

// Returns the bytes that the library has mapped and not unmapped.
int64_t os_faults_mapped_bytes(void) { return mapped_bytes; }

// --- the calls

void* malloc(size_t bytes) {
  const int code = count(kMalloc, CALLER);
  if (code == 0) return __libc_malloc(bytes);
  errno = code;
  return nullptr;
}

void* mmap(void* start, size_t bytes, int protection, int flags, int file, off_t offset) {
  const int code = count(kMmap, CALLER);
  if (code != 0) {
    errno = code;
    return MAP_FAILED;
  }
  void* const mapped = REAL(mmap)(start, bytes, protection, flags, file, offset);
  if (mapped != MAP_FAILED && is_watched(CALLER)) mapped_bytes += static_cast<int64_t>(bytes);
  return mapped;
}

int munmap(void* start, size_t bytes) {
  const int code = count(kMunmap, CALLER);
  if (code != 0) return refuse(code);
  const int result = REAL(munmap)(start, bytes);
  if (result == 0 && is_watched(CALLER)) mapped_bytes -= static_cast<int64_t>(bytes);
  return result;
}

int madvise(void* start, size_t bytes, int advice) {
  const int code = count(kMadvise, CALLER);
  return code != 0 ? refuse(code) : REAL(madvise)(start, bytes, advice);
}

long syscall(long number, ...) {
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const int code = number == SYS_mbind ? count(kMbind, CALLER) : 0;
  if (code != 0) return refuse(code);
  return REAL(syscall)(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                       arguments[5]);
}

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  const bool unnamed = (flags & O_TMPFILE) == O_TMPFILE;
  const int code = count(unnamed ? kOpenUnnamed : kOpen, CALLER);
  return code != 0 ? refuse(code) : REAL(open)(path, flags, mode);
}

int mkostemp(char* name, int flags) {
  const int code = count(kMkostemp, CALLER);
  return code != 0 ? refuse(code) : REAL(mkostemp)(name, flags);
}

int fcntl(int file, int command, ...) {
  va_list list;
  va_start(list, command);
  void* const argument = va_arg(list, void*);
  va_end(list);
  const int code = count(kFcntl, CALLER);
  return code != 0 ? refuse(code) : REAL(fcntl)(file, command, argument);
}

int fstat(int file, struct stat* facts) {
  const int code = count(kFstat, CALLER);
  return code != 0 ? refuse(code) : REAL(fstat)(file, facts);
}

int statvfs(const char* path, struct statvfs* facts) {
  const int code = count(kStatvfs, CALLER);
  return code != 0 ? refuse(code) : REAL(statvfs)(path, facts);
}

int fallocate(int file, int mode, off_t offset, off_t bytes) {
  const int code = count(kFallocate, CALLER);
  return code != 0 ? refuse(code) : REAL(fallocate)(file, mode, offset, bytes);
}

ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  const int code = count(kPread, CALLER);
  if (code == kShort) bytes = (bytes + 1) / 2;
  if (code > 0) return refuse(code);
  return REAL(pread)(file, to, bytes, offset);
}

ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
  const int code = count(kPwrite, CALLER);
  if (code == kShort) bytes = (bytes + 1) / 2;
  if (code > 0) return refuse(code);
  return REAL(pwrite)(file, from, bytes, offset);
}

ssize_t read(int file, void* to, size_t bytes) {
  const int code = count(kRead, CALLER);
  return code != 0 ? refuse(code) : REAL(read)(file, to, bytes);
}

int sync_file_range(int file, off64_t offset, off64_t bytes, unsigned flags) {
  const int code = count(kSyncFileRange, CALLER);
  return code != 0 ? refuse(code) : REAL(sync_file_range)(file, offset, bytes, flags);
}

int posix_fadvise(int file, off_t offset, off_t bytes, int advice) {
  const int code = count(kFadvise, CALLER);
  return code != 0 ? code : REAL(posix_fadvise)(file, offset, bytes, advice);
}

int ftruncate(int file, off_t bytes) {
  const int code = count(kFtruncate, CALLER);
  return code != 0 ? refuse(code) : REAL(ftruncate)(file, bytes);
}

int close(int file) {
  const int code = count(kClose, CALLER);
  const int result = REAL(close)(file);
  return code != 0 ? refuse(code) : result;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
  const int code = count(kPthreadCreate, CALLER);
  return code != 0 ? code : REAL(pthread_create)(thread, attributes, start, argument);
}

}  // extern "C"
