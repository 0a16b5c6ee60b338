#include "core/platform/lifecycle.h"

#include <pthread.h>

#include "core/platform/status.h"

namespace memsaver {

namespace lifecycle {
std::atomic<bool> inert_child{false};
}

namespace {
std::atomic<bool> opened{false};
}

void driver_is_open() noexcept {
  if (opened.exchange(true)) return;
  pthread_atfork(nullptr, nullptr,
                 [] { lifecycle::inert_child.store(true, std::memory_order_relaxed); });
}

void require_not_forked() {
  if (!forked()) return;
  throw Error(Status::kInvalidState,
              "memsaver is inert in a forked child, because CUDA does not survive a fork; start "
              "children with "
              "multiprocessing's 'spawn' method, or exec a new program");
}

}  // namespace memsaver
