#include "hooks/preload_runtime.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <string.h>

namespace memsaver::hooks {

std::atomic<Caller*> first_caller;

namespace {

constexpr unsigned kMaxCallers = 128;  // further callers work without the cache

// Hooks run in the middle of other allocators and during process exit, so this file allocates and
// destroys nothing.
Caller callers[kMaxCallers];
std::atomic<unsigned> used_callers;

constexpr const char* kNames[] = {
#define X(name, parameters, ...) #name,
    MEMSAVER_HOOKS(X) MEMSAVER_CALLED(X)
#undef X
};

// A loaded object as described by the dynamic linker. Owns its strings.
struct Object {
  uintptr_t begin = 0, end = 0;
  const char* path = "";          // "" for the program itself
  const char* version = nullptr;  // the version of the CUDA runtime that it was linked against

  bool contains(const void* address) const {
    const auto value = reinterpret_cast<uintptr_t>(address);
    return begin <= value && value < end;
  }
};

bool names_a_runtime(const char* path) {
  const char* slash = strrchr(path, '/');
  return strncmp(slash != nullptr ? slash + 1 : path, "libcudart", strlen("libcudart")) == 0;
}

const char* wanted_version(const dl_phdr_info& info, uintptr_t dynamic) {
  uintptr_t strings = 0, needs = 0;
  size_t count = 0;
  for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(dynamic); entry->d_tag != DT_NULL;
       ++entry) {
    if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
    if (entry->d_tag == DT_VERNEED) needs = entry->d_un.d_ptr;
    if (entry->d_tag == DT_VERNEEDNUM) count = entry->d_un.d_val;
  }
  if (strings == 0 || needs == 0) return nullptr;
  // The dynamic linker relocates some of these addresses in place, depending on the platform.
  if (strings < info.dlpi_addr) strings += info.dlpi_addr;
  if (needs < info.dlpi_addr) needs += info.dlpi_addr;
  const auto* text = reinterpret_cast<const char*>(strings);
  for (; count > 0; --count) {
    const auto* need = reinterpret_cast<const ElfW(Verneed)*>(needs);
    if (names_a_runtime(text + need->vn_file)) {
      return text + reinterpret_cast<const ElfW(Vernaux)*>(needs + need->vn_aux)->vna_name;
    }
    if (need->vn_next == 0) break;
    needs += need->vn_next;
  }
  return nullptr;
}

// Returns the object that contains an address, or an empty one for generated code.
Object object_at(const void* address) {
  struct Search {
    const void* address;
    Object found;
  } search{address, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) -> int {
        auto& wanted = *static_cast<Search*>(data);
        Object object;
        object.begin = UINTPTR_MAX;
        uintptr_t dynamic = 0;
        for (size_t i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
          if (header.p_type == PT_DYNAMIC) dynamic = begin;
          if (header.p_type != PT_LOAD) continue;
          if (begin < object.begin) object.begin = begin;
          if (begin + header.p_memsz > object.end) object.end = begin + header.p_memsz;
        }
        if (!object.contains(wanted.address)) return 0;
        object.path = info->dlpi_name != nullptr ? info->dlpi_name : "";
        if (dynamic != 0) object.version = wanted_version(*info, dynamic);
        wanted.found = object;
        return 1;
      },
      &search);
  return search.found;
}

// Copies the path of the loaded runtime with index `n`. Returns false if there is none.
bool runtime_path(unsigned n, char (&path)[PATH_MAX]) {
  struct Search {
    unsigned left;
    char* path;
  } search{n, path};
  return dl_iterate_phdr(
             [](dl_phdr_info* info, size_t, void* data) -> int {
               auto& wanted = *static_cast<Search*>(data);
               if (info->dlpi_name == nullptr || !names_a_runtime(info->dlpi_name)) return 0;
               if (strlen(info->dlpi_name) >= PATH_MAX || wanted.left-- > 0) return 0;
               strcpy(wanted.path, info->dlpi_name);
               return 1;
             },
             &search) != 0;
}

// One search for one function.
class Finder {
 public:
  Finder(const char* name, const Object& caller) : name_(name), caller_(caller) {}

  void* find() const {
    bool runtime = false;
    void* next = usable(dlsym(RTLD_NEXT, name_), &runtime);
    if (next != nullptr) {
      if (!runtime || caller_.version == nullptr) return next;
      if (void* same = usable(dlvsym(RTLD_NEXT, name_, caller_.version))) return same;
    }
    if (void* own = caller_.path[0] != '\0' ? in_object(caller_.path, false) : nullptr) return own;
    if (next != nullptr) return next;
    char path[PATH_MAX];
    for (bool exact = caller_.version != nullptr;; exact = false) {
      for (unsigned n = 0; runtime_path(n, path); ++n) {
        if (void* any = in_object(path, exact)) return any;
      }
      if (!exact) return nullptr;
    }
  }

 private:
  // Searches a loaded object and its dependencies; `exact` requires the caller's version.
  void* in_object(const char* path, bool exact) const {
    void* handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) return nullptr;
    void* found = nullptr;
    if (caller_.version != nullptr) found = usable(dlvsym(handle, name_, caller_.version));
    if (found == nullptr && !exact) found = usable(dlsym(handle, name_));
    dlclose(handle);
    return found;
  }

  // Returns the function, and keeps its object loaded. Returns null if calling it would
  // recurse: this library's own function, or the function of an interposer that is itself the
  // caller.
  void* usable(void* function, bool* runtime = nullptr) const {
    Dl_info own, its;
    if (function == nullptr || dladdr(function, &its) == 0 || its.dli_fname == nullptr) {
      return function;
    }
    if (dladdr(&first_caller, &own) != 0 && own.dli_fbase == its.dli_fbase) return nullptr;
    const bool in_runtime = names_a_runtime(its.dli_fname);
    if (!in_runtime && caller_.contains(function)) return nullptr;
    if (runtime != nullptr) *runtime = in_runtime;
    dlopen(its.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    return function;
  }

  const char* name_;
  const Object& caller_;
};

void remember(const Object& object, Call call, void* function) {
  if (object.end == 0) return;
  const uintptr_t bytes = object.end - object.begin;
  Caller* caller = first_caller.load(std::memory_order_acquire);
  while (caller != nullptr && (caller->begin != object.begin || caller->bytes != bytes)) {
    caller = caller->next;
  }
  if (caller == nullptr) {
    // Two threads may both add the object; searches use the first entry found.
    if (used_callers.load(std::memory_order_relaxed) >= kMaxCallers) return;
    const unsigned slot = used_callers.fetch_add(1, std::memory_order_relaxed);
    if (slot >= kMaxCallers) return;
    caller = &callers[slot];
    caller->begin = object.begin;
    caller->bytes = bytes;
    Caller* first = first_caller.load(std::memory_order_relaxed);
    do {
      caller->next = first;
    } while (!first_caller.compare_exchange_weak(first, caller, std::memory_order_release,
                                                 std::memory_order_relaxed));
  }
  caller->real[static_cast<unsigned>(call)].store(function, std::memory_order_release);
}

}  // namespace

void* find_real(Call call, const void* return_address) noexcept {
  const int saved_errno = errno;
  const Object caller = object_at(return_address);
  void* function = Finder(kNames[static_cast<unsigned>(call)], caller).find();
  if (function != nullptr) remember(caller, call, function);
  dlerror();  // a caller's dlerror() must not report a failed lookup of this library
  errno = saved_errno;
  return function;
}

}  // namespace memsaver::hooks
