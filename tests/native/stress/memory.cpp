// The stress thread's operations on its own memory.
#include "runtime.h"
#include "streams.h"
#include "thread.h"

namespace stress {
namespace {

constexpr size_t kMostBlocks = 16;

// A region that is open during this object's life, if it could be entered.
class Region {
 public:
  Region(const Tag& tag, ms_error* error)
      : status(ms_region_enter(tag.name.c_str(), tag.policy, error)) {}
  ~Region() {
    if (status == MS_OK) ms_region_exit(nullptr);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const ms_status status;
};

}  // namespace

Block* Thread::any_block() { return blocks_.empty() ? nullptr : &blocks_[below(blocks_.size())]; }

std::pair<Block*, std::shared_lock<std::shared_mutex>> Thread::held_block(bool paused) {
  Block* const block = any_block();
  if (!block) return {};
  Tag& tag = tag_of(*block);
  std::shared_lock<std::shared_mutex> lock(tag.contents);
  if (tag.paused != paused) return {};
  return {block, std::move(lock)};
}

bool Thread::allocate() {
  if (blocks_.size() >= kMostBlocks) return free_one();
  Block block;
  block.tag = static_cast<int>(below(world_.tags.size()));
  block.device = static_cast<int>(below(kDevices));
  const uint64_t magnitude = 1ull << (9 + below(14));
  block.bytes = magnitude + below(magnitude);
  const Tag& tag = tag_of(block);
  void* const stream = streams_[block.device];
  ms_error error{};
  const uint64_t way = below(7);
  if (way == 0) {  // through the stream's tag, outside of regions
    if (!fine(ms_stream_bind(stream, tag.name.c_str(), tag.policy, &error), error, "ms_stream_bind",
              {MS_INVALID_STATE})) {
      return false;
    }
    const bool made = fine(ms_malloc_any(block.bytes, block.device, stream, &block.pointer, &error),
                           error, "ms_malloc_any", {MS_OUT_OF_DEVICE_MEMORY});
    fine(ms_stream_unbind(stream, &error), error, "ms_stream_unbind", {});
    if (!made) return false;
  } else {
    const Region region(tag, &error);
    if (!fine(region.status, error, "ms_region_enter", {MS_INVALID_STATE})) return false;
    cudaSetDevice(block.device);
    switch (way) {
      case 1:
        if (cudaMalloc(&block.pointer, block.bytes) != 0) block.pointer = nullptr;
        break;
      case 2:
        if (cudaMallocAsync(&block.pointer, block.bytes, stream) != 0) block.pointer = nullptr;
        break;
      case 3:
        block.pointer = ms_torch_malloc(static_cast<ptrdiff_t>(block.bytes), block.device, stream);
        break;
      default:
        fine(ms_malloc(block.bytes, block.device, &block.pointer, &error), error, "ms_malloc",
             {MS_OUT_OF_DEVICE_MEMORY});
    }
    if (!block.pointer) return false;
    if (!ms_wants() || !ms_region_tag() || ms_region_depth() != 1) {
      world_.fail("the thread's region is not the one that it entered");
    }
  }
  if (!ms_owns(block.pointer)) world_.fail("an allocation in a region is plain memory");
  blocks_.push_back(block);
  return true;
}

void Thread::free_block(const Block& block) {
  ms_error error{};
  void* const stream = streams_[block.device];
  switch (below(5)) {
    case 0:
      if (cudaFree(block.pointer) != 0) world_.fail("cudaFree failed");
      break;
    case 1:
      if (cudaFreeAsync(block.pointer, stream) != 0) world_.fail("cudaFreeAsync failed");
      break;
    case 2:
      ms_torch_free(block.pointer, block.bytes, block.device, stream);
      break;
    case 3:
      fine(ms_free_any(block.pointer, block.device, &error), error, "ms_free_any", {});
      break;
    default:
      fine(ms_free(block.pointer, &error), error, "ms_free", {});
  }
}

bool Thread::free_one() {
  Block block;
  if (one_in(2)) {
    const std::lock_guard<std::mutex> lock(world_.mutex);
    if (!world_.given.empty()) {
      block = world_.given.front();
      world_.given.pop_front();
    }
  }
  if (!block.pointer) {
    if (blocks_.empty()) return false;
    std::swap(*any_block(), blocks_.back());
    block = blocks_.back();
    blocks_.pop_back();
  }
  free_block(block);
  return true;
}

bool Thread::hand_over() {
  if (blocks_.empty()) return false;
  settle();
  const std::lock_guard<std::mutex> lock(world_.mutex);
  world_.given.push_back(blocks_.back());
  blocks_.pop_back();
  return true;
}

bool Thread::write() {
  settle();
  const auto [block, lock] = held_block(false);
  if (!block) return false;
  block->value = random_();
  block->filling = Filling::kPattern;
  block->losses = tag_of(*block).losses;
  write_pattern(block->pointer, block->bytes, block->value);
  return true;
}

bool Thread::fill_on_stream() {
  const auto [block, lock] = held_block(false);
  if (!block) return false;
  fill_later(*block);
  block->losses = tag_of(*block).losses;
  return true;
}

// Sets the block's expected contents; the caller sets `losses`.
void Thread::fill_later(Block& block) {
  block.filling = Filling::kByte;
  block.value = below(256);
  working_ = true;
  if (!queue_fill(block.device, streams_[block.device], block.pointer,
                  static_cast<unsigned char>(block.value), block.bytes)) {
    world_.fail("a fill could not be queued");
  }
}

bool Thread::check() {
  settle();
  const auto [block, lock] = held_block(false);
  if (!block) return false;
  require_contents(*block, block->pointer);
  return true;
}

void Thread::settle() {
  if (!working_) return;
  for (int device = 0; device < kDevices; ++device) {
    if (!wait_for(device, streams_[device])) world_.fail("a stream cannot be waited for");
  }
  working_ = false;
}

}  // namespace stress
