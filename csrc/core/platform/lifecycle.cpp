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

void set_driver_open(bool open) noexcept {
  static const int prepared_for_forks = pthread_atfork(nullptr, nullptr, [] {
    if (opened.load()) lifecycle::inert_child.store(true, std::memory_order_relaxed);
  });
  (void)prepared_for_forks;
  opened.store(open);
}

void require_not_forked() {
  if (!forked()) return;
  throw Error(Status::kInvalidState,
              "memsaver is inert in a forked child, because CUDA does not survive a fork; start "
              "children with "
              "multiprocessing's 'spawn' method, or exec a new program");
}

}  // namespace memsaver
