// The library for LD_PRELOAD. It translates torch_memory_saver's variables, loads memsaver's
// library, and exports torch_memory_saver's functions (tms.c), which call memsaver.
//
// It depends only on libc, because every process exits if a preloaded library lacks a dependency.
// If memsaver is not found, or a variable is invalid, it does nothing; the Python package reports
// the problem when it is used. Nothing is printed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "tms.h"

static const char kLibrary[] = "libmemsaver_preload.so";
static const char kTag[] = "default";  // torch_memory_saver's tag for a whole process

// Set together with MEMSAVER_TAG and MEMSAVER_BACKUP if this library sets them. A child that
// inherits the variables uses this to decide whether they still apply.
static const char kMade[] = "TMS_MADE_MEMSAVER_TAG";

bool tms_is_true(const char* name) {
  static const char* const words[] = {"1", "true", "TRUE", "yes", "YES"};
  const char* value = getenv(name);
  for (size_t i = 0; value && i < sizeof words / sizeof *words; ++i) {
    if (strcmp(value, words[i]) == 0) return true;
  }
  return false;
}

// If both backups are requested, which is an error, contents are still kept.
static const char* wanted_backup(void) {
  if (tms_is_true("TMS_INIT_ENABLE_CPU_BACKUP")) {
    const char* kind = getenv("TMS_INIT_CPU_BACKUP_BACKEND");
    return kind && strcmp(kind, "mmap") == 0 ? "pageable" : "host";
  }
  return tms_is_true("TMS_INIT_ENABLE_DISK_BACKUP") ? "disk" : "none";
}

static const char* past_blanks(const char* text) { return text + strspn(text, " \t"); }

// Torch's expandable segments allocate directly from the driver, which no hook intercepts.
static void turn_off_expandable_segments(const char* variable) {
  static const char name[] = "expandable_segments";
  const char* value = getenv(variable);
  if (!value) return;
  const size_t room = 2 * strlen(value) + 1;  // "False" is one longer than "True"
  char* changed = calloc(room, 1);
  if (!changed) return;
  char* end = changed;
  bool found = false;
  while (*value) {
    const char* after = NULL;
    if (strncasecmp(value, name, sizeof name - 1) == 0) {
      after = past_blanks(value + sizeof name - 1);
      after = *after == ':' ? past_blanks(after + 1) : NULL;
    }
    if (after && strncasecmp(after, "true", 4) == 0) {
      memcpy(end, value, (size_t)(after - value));
      end += after - value;
      memcpy(end, "False", 5);
      end += 5;
      value = after + 4;
      found = true;
    } else {
      *end++ = *value++;
    }
  }
  if (found) setenv(variable, changed, 1);
  free(changed);
}

static void translate_variables(void) {
  if (getenv(kMade)) {  // by a parent's TMS_INIT_ENABLE
    unsetenv("MEMSAVER_TAG");
    unsetenv("MEMSAVER_BACKUP");
    unsetenv(kMade);
  }
  if (getenv("MEMSAVER_TAG") || !tms_is_true("TMS_INIT_ENABLE")) return;
  setenv("MEMSAVER_TAG", kTag, 1);
  setenv("MEMSAVER_BACKUP", wanted_backup(), 1);
  setenv(kMade, "1", 1);
  turn_off_expandable_segments("PYTORCH_ALLOC_CONF");
  turn_off_expandable_segments("PYTORCH_CUDA_ALLOC_CONF");
}

// Makes libraries that are loaded later bind to memsaver's cudaMalloc.
static void* load_memsaver(void) {
  void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (library) return library;  // preloaded by its own name
  Dl_info own;
  char path[PATH_MAX];
  const char* slash = NULL;
  if (dladdr(kLibrary, &own) && own.dli_fname) slash = strrchr(own.dli_fname, '/');
  if (slash) {
    const int length = snprintf(path, sizeof path, "%.*s/memsaver/%s", (int)(slash - own.dli_fname),
                                own.dli_fname, kLibrary);
    if (length > 0 && (size_t)length < sizeof path) library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  }
  return library ? library : dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);  // LD_LIBRARY_PATH
}

__attribute__((constructor)) static void start(void) {
  const int saved_errno = errno;
  translate_variables();
  tms_find_memsaver(load_memsaver());
  dlerror();
  errno = saved_errno;
}
