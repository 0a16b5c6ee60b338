#include "contexts.h"

#include <atomic>

#include "capture.h"
#include "state.h"

namespace memsaver::sim {
namespace {

constexpr int kMostCurrent = 64;
thread_local Context* t_stack[kMostCurrent];
thread_local int t_depth = 0;

uint64_t number_of_this_thread() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t number = next++;
  return number;
}

}  // namespace

StreamPtr Context::stream_of_this_thread() {
  StreamPtr& stream = per_thread[number_of_this_thread()];
  if (stream == nullptr) stream = state().streams.create(this, nullptr, true);
  return stream;
}

Context* find_context(CUcontext handle) {
  for (const auto& device : state().devices) {
    if (device->context.handle() == handle && device->context.retained > 0) {
      return &device->context;
    }
  }
  return nullptr;
}

void retain(Context* context) {
  if (context->retained++ > 0) return;
  context->legacy = state().streams.create(context, nullptr, true);
  context->legacy->legacy = true;
}

CUresult release(Lock* lock, Context* context) {
  State& shared = state();
  if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (context->retained > 1) {
    --context->retained;
    return CUDA_SUCCESS;
  }
  shared.streams.wait(lock, shared.streams.pending(context));
  if (--context->retained > 0) return CUDA_SUCCESS;  // another thread retained it during the wait
  shared.captures.drop_all_of(context);
  const std::vector<StreamPtr> streams = shared.streams.all();
  for (const StreamPtr& stream : streams) {
    if (stream->context == context && !stream->closed) shared.streams.close(stream);
  }
  for (auto at = shared.events.begin(); at != shared.events.end();) {
    at = at->second->context == context ? shared.events.erase(at) : std::next(at);
  }
  for (auto at = shared.modules.begin(); at != shared.modules.end();) {
    at = at->second.context == context ? shared.modules.erase(at) : std::next(at);
  }
  shared.space.free_blocks_of(context->device);
  shared.host.drop_all_of(context->device);
  context->legacy = nullptr;
  context->per_thread.clear();
  context->broken = CUDA_SUCCESS;
  return CUDA_SUCCESS;
}

Context* current_context() { return t_depth == 0 ? nullptr : t_stack[t_depth - 1]; }

void set_current(Context* context) {
  if (context == nullptr) {
    if (t_depth > 0) --t_depth;
    return;
  }
  if (t_depth == 0) ++t_depth;
  t_stack[t_depth - 1] = context;
}

bool push_current(Context* context) {
  if (t_depth == kMostCurrent) return false;
  t_stack[t_depth++] = context;
  return true;
}

bool pop_current(Context** context) {
  if (t_depth == 0) return false;
  *context = t_stack[--t_depth];
  return true;
}

}  // namespace memsaver::sim
