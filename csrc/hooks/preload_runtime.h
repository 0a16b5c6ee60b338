// Finds the function that a hook's caller would call if this library were not in the process.
//
// A process can contain several CUDA runtimes, for example torch's runtime, a renamed copy in
// another package, or a runtime of another major version. A runtime can be in the global scope, or
// in a local scope that RTLD_NEXT does not search. Each runtime has its own current device and last
// error, so a call must reach the runtime that the caller also uses for its other calls. The search
// follows the dynamic linker's order:
//   1. the global scope after this library, which contains other preloaded interposers and then a
//      runtime, unless the caller was linked against another symbol version (libcudart.so.12 /
//      .13);
//   2. the scope of the caller's own dependencies, which can contain a runtime loaded with
//      RTLD_LOCAL;
//   3. a global runtime of another version;
//   4. any loaded runtime, starting with those of the caller's version. This step is for callers
//      that are not linked to a runtime, such as ctypes, a plug-in that relies on its host, or an
//      interposer that precedes this library.
// If the compiler turned a call into a jump, the search starts at the caller's caller. Memory
// always belongs to the driver, regardless of which runtime allocates it.
#ifndef MEMSAVER_HOOKS_PRELOAD_RUNTIME_H_
#define MEMSAVER_HOOKS_PRELOAD_RUNTIME_H_

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "hooks/preload_list.h"

namespace memsaver::hooks {

// clang-format off
enum class Call : unsigned {
#define X(name, parameters, ...) name,
  MEMSAVER_HOOKS(X) MEMSAVER_CALLED(X)
#undef X
  kCount
};

template <Call call>
struct Signature;
#define X(name, parameters, ...)     \
  template <>                        \
  struct Signature<Call::name> {     \
    using Function = int parameters; \
  };
MEMSAVER_HOOKS(X)
MEMSAVER_CALLED(X)
#undef X
// clang-format on

// The real functions to which the hooked calls of one loaded object resolve. Never freed. Entries
// of `real` are resolved lazily. The shared objects that define the functions stay loaded. If
// another object is later loaded at the caller's addresses, it inherits the entry.
struct Caller {
  uintptr_t begin, bytes;
  Caller* next;
  std::atomic<void*> real[static_cast<unsigned>(Call::kCount)];
};

// The list of known callers, with the latest first.
extern std::atomic<Caller*> first_caller;

// Searches for a function. Returns null if the process has no such function; this result is not
// cached, so the next call searches again. Any thread may call this function at any time. It
// acquires none of memsaver's locks, only the dynamic linker's lock, which the thread may already
// own (in a constructor). Preserves errno.
void* find_real(Call call, const void* return_address) noexcept;

// Returns the function for a caller, or null. After the first call, a call costs a few loads and a
// comparison.
template <Call call>
typename Signature<call>::Function* real(const void* return_address) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(return_address);
  void* function = nullptr;
  for (const Caller* caller = first_caller.load(std::memory_order_acquire); caller != nullptr;
       caller = caller->next) {
    if (address - caller->begin < caller->bytes) {
      function = caller->real[static_cast<unsigned>(call)].load(std::memory_order_acquire);
      break;
    }
  }
  if (__builtin_expect(function == nullptr, 0)) function = find_real(call, return_address);
  return reinterpret_cast<typename Signature<call>::Function*>(function);
}

}  // namespace memsaver::hooks

#endif  // MEMSAVER_HOOKS_PRELOAD_RUNTIME_H_
