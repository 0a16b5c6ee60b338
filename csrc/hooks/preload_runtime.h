// Which function a hook's caller would have reached if this library were not in the process.
//
// A process may hold several CUDA runtimes: torch's, a renamed copy that another package bundles,
// one of another major version; global or in a local scope, where RTLD_NEXT does not look. A
// runtime keeps its current device and last error to itself, so a call must end in the one to
// which the rest of the caller is bound. The dynamic linker's own order finds it:
//   1. the global scope behind this library: other preloaded interposers first, then a runtime in
//      it, unless the caller was linked against another symbol version (libcudart.so.12 / .13);
//   2. the scope of the caller's own dependencies: a runtime loaded with RTLD_LOCAL;
//   3. a global runtime of another version;
//   4. any loaded runtime, of the caller's version first: for callers that name none, such as
//      ctypes, a plug-in that leans on its host, or an interposer in front of this library.
// A call that the compiler turned into a jump shows its caller's caller. The memory is the
// driver's whichever runtime asks for it.
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

// What has been found for the calls of one loaded object. Never freed; `real` fills up over time.
// The objects that the functions lie in stay loaded from then on. Another object that is loaded
// where this one was inherits what was found for it.
struct Caller {
  uintptr_t begin, bytes;
  Caller* next;
  std::atomic<void*> real[static_cast<unsigned>(Call::kCount)];
};

// The callers known so far, the latest first.
extern std::atomic<Caller*> first_caller;

// The search itself. Null if the process holds no such function: nothing is remembered then, and
// the next call searches again. Any thread, at any time, without a lock of ours: the dynamic
// linker's is taken, which a thread may hold already (in a constructor). Keeps errno.
void* find_real(Call call, const void* return_address) noexcept;

// The function for a caller, or null. After the first time some loads and a comparison.
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
