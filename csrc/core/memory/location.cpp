#include "core/memory/location.h"

#include <mutex>

namespace memsaver {

Location locate(uint64_t address) {
  const Pool* const pool = Registry::owner(address);
  if (!pool) throw Error(Status::kNotOurs, "the address was not reserved by memsaver");
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  const Tag& tag = pool->tag;
  const bool changes = tag.state == State::kSaving || tag.state == State::kRestoring;
  Location found{&tag,
                 pool->heap.device().ordinal(),
                 tag.state,
                 {},
                 changes ? tag.current_transition : tag.last_transition};
  found.block = pool->heap.block_around(address).value_or(Range{});
  return found;
}

const char* paused_tag(uint64_t address) noexcept {
  const Pool* const pool = Registry::owner(address);
  const bool paused = pool && !pool->tag.accepting.load(std::memory_order_acquire);
  return paused ? pool->tag.name.c_str() : nullptr;
}

}  // namespace memsaver
