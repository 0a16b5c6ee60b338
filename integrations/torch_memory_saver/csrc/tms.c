// Implements the functions of torch_memory_saver's library, which programs call through ctypes or
// dlsym, with memsaver's C ABI.
//
// Contract of every function:
//   - Any thread may call it. It prints nothing and never terminates the process.
//   - If memsaver's library was not found, it has no effect, and tms_pause and tms_resume return an
//     error.
//   - A failure of a function that returns nothing becomes a MemsaverWarning (ms_warn).
//   - The setters apply to the calling thread's later allocations, and override its regions. A
//     region that is entered after them in Python must be left before they are called again. A
//     thread that ends leaves its sections.
//   - A pause calls no Python callbacks and saves everything, including memory of freed tensors.
#define _GNU_SOURCE
#include "tms.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TMS_API __attribute__((visibility("default")))

// Values of cudaError_t, equal in every version.
enum {
  kSuccess = 0,
  kErrorMemoryAllocation = 2,
  kErrorInitializationError = 3,
  kErrorUnknown = 999
};

// The parts of memsaver.h that this file uses, copied because the header is not installed. The
// values never change.
enum { kBackupNone, kBackupHost, kBackupPageable, kBackupDisk, kBackups };
enum { kOk = 0, kInvalidState = 2, kOutOfDeviceMemory = 4, kOutOfHostMemory = 5, kNotLoaded = 8 };
enum { kPaused = 2 };
static const char* const kBackupNames[kBackups] = {"none", "host", "pageable", "disk"};

typedef struct ms_error {
  int32_t status, cuda_error, os_error, device;
  uint64_t needed_bytes, free_bytes;
  char call[48], tag[128], message[1024];
} ms_error;

typedef struct ms_change {
  const char* tag;
  int32_t device, changed;
  uint64_t device_bytes, copied_bytes;
} ms_change;

// X(name, result, parameters): memsaver's functions that are used here.
#define FUNCTIONS(X)                                                                              \
  X(ms_warn, void, (const char*))                                                                 \
  X(ms_configure, int, (const char*, const char*, ms_error*))                                     \
  X(ms_list_free, void, (void*))                                                                  \
  X(ms_region_enter, int, (const char*, int, ms_error*))                                          \
  X(ms_region_exit, int, (ms_error*))                                                             \
  X(ms_disable_enter, int, (ms_error*))                                                           \
  X(ms_region_tag, const char*, (void))                                                           \
  X(ms_region_depth, size_t, (void))                                                              \
  X(ms_tag_state, int, (const char*, int*, ms_error*))                                            \
  X(ms_tag_backup, int, (const char*, int*, ms_error*))                                           \
  X(ms_pause, int,                                                                                \
    (const char* const*, size_t, int, const void*, size_t, const uint64_t*, ms_change**, size_t*, \
     ms_error*))                                                                                  \
  X(ms_resume, int, (const char* const*, size_t, ms_change**, size_t*, ms_error*))                \
  X(ms_trim_tags, int, (const char* const*, size_t, uint64_t*, ms_error*))                        \
  X(ms_backup_view, int, (uint64_t, uint64_t, int, void**, ms_error*))                            \
  X(ms_retained_view, int, (uint64_t, uint64_t, int, void**, ms_error*))

#define X(name, result, parameters) static result(*name) parameters;
FUNCTIONS(X)
#undef X
static bool has_memsaver;

void tms_find_memsaver(void* library) {
  has_memsaver = library != NULL;
#define X(name, result, parameters)                        \
  *(void**)&name = library ? dlsym(library, #name) : NULL; \
  has_memsaver = has_memsaver && name != NULL;
  FUNCTIONS(X)
#undef X
}

static void warn(const ms_error* error) { ms_warn(error->message); }

// --- parts of a tag (memsaver/_transitions/parts.py): TAG, U+001F, and the name of the part's
// backup

// Returns the name of a part, which the caller frees; NULL if there is no memory.
static char* part(const char* tag, int backup) {
  char* name = NULL;
  return asprintf(&name, "%s\x1f%s", tag, kBackupNames[backup]) < 0 ? NULL : name;
}

static bool is_known(const char* name, int* backup) {
  return ms_tag_backup(name, backup, NULL) == kOk;
}

// Enters a region of the tag's part with this backup. If several threads enter a tag's first
// regions concurrently, the lock decides which part is the tag itself.
static int enter(const char* tag, int backup, ms_error* error) {
  static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
  int policy = backup;
  pthread_mutex_lock(&first);
  const bool is_first = !is_known(tag, &policy);
  int status = is_first ? ms_region_enter(tag, backup, error) : kOk;
  pthread_mutex_unlock(&first);
  if (is_first) return status;
  char* name = policy == backup ? strdup(tag) : part(tag, backup);
  if (!name) return kOutOfHostMemory;
  status = ms_region_enter(name, backup, error);
  free(name);
  return status;
}

// Fills `names` with the known parts of a tag, for release_names(); returns their number.
static size_t names_of(const char* tag, const char* names[kBackups + 1]) {
  size_t count = 0;
  for (int backup = -1; backup < kBackups; ++backup) {
    int policy;
    char* name = backup < 0 ? strdup(tag) : part(tag, backup);
    if (name && is_known(name, &policy)) {
      names[count++] = name;
    } else {
      free(name);
    }
  }
  return count;
}

static void release_names(const char* names[], size_t count) {
  for (size_t i = 0; i < count; ++i) free((char*)names[i]);
}

// --- the tag and the backup of the calling thread's allocations

enum { kUnset = -1 };

// A thread's settings (kUnset or NULL if not set), and the section that it entered because of them.
// The settings apply in the region in which they were made. The first setting in another region
// resets them.
typedef struct Settings {
  int interesting, cpu, disk, pinned;
  char* tag;
  size_t around;  // depth of the thread's stack of regions at which the settings were made
  size_t depth;   // depth of the stack with the section on it; 0: the thread is in no section
  char shown[256];
} Settings;

static _Thread_local Settings own = {
    .interesting = kUnset, .cpu = kUnset, .disk = kUnset, .pinned = kUnset};

static int from_environment(const char* name) { return tms_is_true(name) ? 1 : 0; }

static int pinned(void) {
  if (own.pinned != kUnset) return own.pinned;
  const char* kind = getenv("TMS_INIT_CPU_BACKUP_BACKEND");
  return !(kind && strcmp(kind, "mmap") == 0);
}

// Returns the backup of the thread's allocations: its settings override the surrounding region's.
static int backup_over(int around) {
  int cpu = own.cpu, disk = own.disk;
  if (cpu == kUnset) cpu = around == kBackupHost || around == kBackupPageable;
  if (disk == kUnset) disk = around == kBackupDisk;
  if (cpu) {
    if (own.cpu == kUnset && own.pinned == kUnset) return around;
    return pinned() ? kBackupHost : kBackupPageable;
  }
  return disk ? kBackupDisk : kBackupNone;
}

// Finds the tag and the backup of the thread's innermost region, without the part's suffix. Returns
// false, with the defaults, if the thread is in no region.
static bool region_around(char* tag, size_t room, int* backup) {
  const char* name = has_memsaver ? ms_region_tag() : NULL;
  *backup = kBackupNone;
  snprintf(tag, room, "%.*s", name ? (int)strcspn(name, "\x1f") : 7, name ? name : "default");
  if (name) is_known(name, backup);
  return name != NULL;
}

static bool leave_section(void) {
  if (own.depth == 0) return true;
  if (ms_region_depth() != own.depth) {
    ms_warn(
        "a tms_set_ function has no effect inside a region that was entered after the previous "
        "tms_set_ call: leave that region first");
    return false;
  }
  ms_region_exit(NULL);
  own.depth = 0;
  return true;
}

// Enters the section for the settings. If its tag is paused, the section is entered after the tag's
// resume.
static void enter_section(void) {
  char* tag = NULL;
  const char* around = ms_region_tag();
  ms_error error = {0};
  int status = kOk;
  int backup = kBackupNone;
  if (around) is_known(around, &backup);
  if (own.interesting == 0) {
    if (!around) return;
    status = ms_disable_enter(&error);
  } else if (own.interesting == 1 || around) {
    const bool same = around && !own.tag && backup_over(backup) == backup;
    if (same) return;
    tag = own.tag  ? strdup(own.tag)
          : around ? strndup(around, strcspn(around, "\x1f"))
                   : strdup("default");
    status =
        tag ? enter(tag, backup_over(around ? backup : kBackupNone), &error) : kOutOfHostMemory;
  } else {
    return;
  }
  free(tag);
  if (status == kOk) {
    own.depth = ms_region_depth();
  } else if (status != kInvalidState) {
    warn(&error);
  }
}

// Leaves the section before a setting is changed; returns false if the setting cannot be changed.
static bool begin_change(void) {
  if (!has_memsaver || !leave_section()) return false;
  if (ms_region_depth() != own.around) {
    free(own.tag);
    own.tag = NULL;
    own.interesting = own.cpu = own.disk = own.pinned = kUnset;
    own.around = ms_region_depth();
  }
  return true;
}

static void change(int* setting, int value) {
  if (!begin_change()) return;
  *setting = value;
  enter_section();
}

TMS_API void tms_set_interesting_region(bool interesting) { change(&own.interesting, interesting); }

TMS_API bool tms_get_interesting_region(void) { return has_memsaver && ms_region_tag() != NULL; }

TMS_API void tms_set_current_tag(const char* tag) {
  if (!tag || !*tag || !begin_change()) return;
  char* copy = strdup(tag);
  if (copy) {
    free(own.tag);
    own.tag = copy;
  }
  enter_section();
}

// Returns a string that is valid until the thread's next call.
TMS_API const char* tms_get_current_tag(void) {
  int backup;
  if (!region_around(own.shown, sizeof own.shown, &backup) && own.tag) return own.tag;
  return own.shown;
}

static int current_backup(void) {
  char tag[2];
  int backup;
  return region_around(tag, sizeof tag, &backup) ? backup : backup_over(kBackupNone);
}

TMS_API void tms_set_enable_cpu_backup(bool enabled) { change(&own.cpu, enabled); }

TMS_API bool tms_get_enable_cpu_backup(void) {
  const int backup = current_backup();
  return backup == kBackupHost || backup == kBackupPageable;
}

TMS_API void tms_set_enable_disk_backup(bool enabled) { change(&own.disk, enabled); }

TMS_API bool tms_get_enable_disk_backup(void) { return current_backup() == kBackupDisk; }

TMS_API void tms_set_cpu_backup_backend(const char* backend) {
  if (!has_memsaver) return;
  const bool is_mmap = backend && strcmp(backend, "mmap") == 0;
  if (backend && *backend && !is_mmap && strcmp(backend, "pinned") != 0) {
    ms_warn("tms_set_cpu_backup_backend takes \"pinned\" or \"mmap\"; anything else has no effect");
    return;
  }
  change(&own.pinned, !is_mmap);
}

TMS_API const char* tms_get_cpu_backup_backend(void) {
  const int backup = current_backup();
  const bool is_pinned = backup == kBackupHost || (backup != kBackupPageable && pinned());
  return is_pinned ? "pinned" : "mmap";
}

// --- settings of the process

TMS_API void tms_set_disk_backup_dir(const char* path) {
  ms_error error;
  if (has_memsaver && path && ms_configure("disk_dir", path, &error) != kOk) warn(&error);
}

TMS_API void set_memory_margin_bytes(uint64_t bytes) {
  char text[24];
  ms_error error;
  snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
  if (has_memsaver && ms_configure("margin_bytes", text, &error) != kOk) warn(&error);
}

static int retain = kUnset;  // kUnset: pinned memory is kept, but its contents are not readable

static int retains(void) {
  const int set = __atomic_load_n(&retain, __ATOMIC_RELAXED);
  if (set != kUnset) return set;
  return getenv("TMS_RETAIN_CPU_BACKUP") ? from_environment("TMS_RETAIN_CPU_BACKUP") : kUnset;
}

TMS_API void tms_set_retain_cpu_backup(bool enabled) {
  __atomic_store_n(&retain, enabled, __ATOMIC_RELAXED);
}

TMS_API bool tms_get_retain_cpu_backup(void) { return retains() == 1; }

// --- pause and resume

static int cuda_error_of(int status) {
  switch (status) {
    case kOk:
      return kSuccess;
    case kOutOfDeviceMemory:
    case kOutOfHostMemory:
      return kErrorMemoryAllocation;
    case kNotLoaded:
      return kErrorInitializationError;
    default:
      return kErrorUnknown;
  }
}

// Releases the host memory of the backups that are not retained.
static int release_backups(const ms_change* rows, size_t count, ms_error* error) {
  int status = kOk;
  for (size_t i = 0; i < count && status == kOk && retains() != 1; ++i) {
    int backup = kBackupNone;
    uint64_t released;
    if (is_known(rows[i].tag, &backup) && (retains() == 0 || backup == kBackupPageable)) {
      status = ms_trim_tags(&rows[i].tag, 1, &released, error);
    }
  }
  return status;
}

// Pauses or resumes the parts of a tag (NULL or "": every tag); returns a cudaError_t. Leaves the
// thread's own section during the call, because a tag with an open region cannot be paused.
static int transition(const char* tag, bool is_pause) {
  if (!has_memsaver) return kErrorInitializationError;
  const char* names[kBackups + 1];
  const bool all = !tag || !*tag;
  const size_t count = all ? 0 : names_of(tag, names);
  if (!all && count == 0) return kSuccess;  // no region has ever named it
  const bool left = own.depth != 0 && leave_section();
  ms_error error;
  ms_change* rows = NULL;
  size_t row_count = 0;
  int status = is_pause ? ms_pause(names, count, kUnset, NULL, 0, NULL, &rows, &row_count, &error)
                        : ms_resume(names, count, &rows, &row_count, &error);
  if (status == kOk && !is_pause) status = release_backups(rows, row_count, &error);
  ms_list_free(rows);
  if (status != kOk) warn(&error);
  if (left || own.depth == 0) enter_section();
  if (!all) release_names(names, count);
  return cuda_error_of(status);
}

// Change all memory of the tag or none. Return 0, or the closest cudaError_t; a MemsaverWarning
// explains the failure.
TMS_API int tms_pause(const char* tag) { return transition(tag, true); }
TMS_API int tms_resume(const char* tag) { return transition(tag, false); }

// Returns the host address of the backup of device memory, for a paused tag, or for a mapped tag
// under tms_set_retain_cpu_backup(true). Returns NULL if there is no backup.
TMS_API uint8_t* tms_get_cpu_backup_pointer(const uint8_t* address, uint64_t bytes) {
  void* host = NULL;
  if (!has_memsaver) return NULL;
  if (ms_backup_view((uintptr_t)address, bytes, 1, &host, NULL) == kOk) return host;
  if (retains() != 1) return NULL;
  return ms_retained_view((uintptr_t)address, bytes, 1, &host, NULL) == kOk ? host : NULL;
}
