#include "core/memory/registry.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/platform/text.h"

namespace memsaver {

const char* name_of(State state) {
  switch (state) {
    case State::kMapped:
      return "mapped";
    case State::kSaving:
      return "saving";
    case State::kPaused:
      return "paused";
    case State::kRestoring:
      return "restoring";
  }
  return "unknown";
}

TransitionRecord TransitionRecord::now() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return {std::chrono::duration<double>(time).count(), syscall(SYS_gettid), nullptr};
}

void TransitionCounters::add(uint64_t device_bytes, uint64_t copied_bytes) noexcept {
  last_device_bytes = device_bytes;
  last_copied_bytes = copied_bytes;
  this->device_bytes += device_bytes;
  this->copied_bytes += copied_bytes;
}

uint64_t Pool::resident_bytes() const noexcept {
  uint64_t bytes = heap.resident_bytes();
  for (const UnmappedPage& page : unmapped_pages) bytes += page.memory.bytes();
  return bytes;
}

std::atomic<Pool*> Registry::slots_[Registry::kSlots] = {};

Registry& Registry::instance() {
  static Registry* const instance = [] {
    auto* const made = new Registry;
    // A fork acquires the lock, because one of the parent's other threads, which the child lacks,
    // could otherwise own it.
    pthread_atfork([] { Registry::instance().mutex.lock(); },
                   [] { Registry::instance().mutex.unlock(); },
                   [] { Registry::instance().mutex.unlock(); });
    return made;
  }();
  return *instance;
}

Tag& Registry::tag(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found != by_name_.end()) return *found->second;
  auto made = std::make_unique<Tag>(name);
  tags_.reserve(tags_.size() + 1);  // so that both lists get the tag, or neither
  by_name_.emplace(name, made.get());
  tags_.push_back(std::move(made));
  return *tags_.back();
}

Tag& Registry::known(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found != by_name_.end()) return *found->second;
  std::vector<std::string> names;
  for (const auto& tag : tags_) names.push_back(tag->name);
  throw Error(Status::kUnknownTag,
              "there is no tag " + quoted(std::string(name)) +
                  ": no region has ever named it; known tags: " + format_names(names))
      .with_tag(std::string(name));
}

std::vector<Tag*> Registry::select(const std::vector<std::string>& names) const {
  std::vector<Tag*> selected;
  for (const std::string& name : names) {
    Tag* const tag = &known(name);
    if (std::find(selected.begin(), selected.end(), tag) == selected.end()) selected.push_back(tag);
  }
  if (names.empty()) {
    for (const auto& tag : tags_) selected.push_back(tag.get());
  }
  return selected;
}

Pool& Registry::pool(Tag& tag, Device& device) {
  return tag.pools.try_emplace(device.ordinal(), tag, device).first->second;
}

void Registry::publish(const VaReservation& span, Pool& pool) {
  const uint64_t first = span.address() / kSlotBytes;
  const uint64_t last = (span.address() + span.bytes() - 1) / kSlotBytes;
  if (last >= kSlots) {
    throw Error(Status::kOutOfDeviceMemory,
                "the driver reserved addresses beyond 2^49, which memsaver does not track");
  }
  for (uint64_t slot = first; slot <= last; ++slot)
    slots_[slot].store(&pool, std::memory_order_release);
}

void Registry::retract(const VaReservation& span) noexcept {
  const uint64_t end = (span.address() + span.bytes()) / kSlotBytes;
  for (uint64_t slot = span.address() / kSlotBytes; slot < end; ++slot)
    slots_[slot].store(nullptr, std::memory_order_release);
}

Error Registry::shortage(const std::string& what, const Device& device, uint64_t needed_bytes) {
  uint64_t free_bytes = 0;
  try {
    free_bytes = device.memory().free_bytes;
  } catch (const Error&) {
    // The message then reports 0 free bytes.
  }
  std::string holders;
  uint64_t peer_bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& tag : tags_) {
      for (const auto& [ordinal, other] : tag->pools) {
        if (ordinal != device.ordinal() && other.backup) peer_bytes += other.backup->peer_bytes();
      }
      const auto pool = tag->pools.find(device.ordinal());
      if (pool == tag->pools.end() || pool->second.heap.resident_bytes() == 0) continue;
      holders += (holders.empty() ? "" : ", ") + quoted(tag->name) + " " +
                 format_bytes(pool->second.heap.resident_bytes());
    }
  }
  Error error(Status::kOutOfDeviceMemory,
              what + " needs " + format_bytes(needed_bytes) + " on device " +
                  std::to_string(device.ordinal()) + ", where " + format_bytes(free_bytes) +
                  " are free; resident tags: " + (holders.empty() ? "none" : holders) +
                  (peer_bytes == 0
                       ? ""
                       : "; backups of other devices' tags use up to " + format_bytes(peer_bytes) +
                             " of it, which memsaver.trim() releases for mapped tags") +
                  "; free memory (torch.cuda.empty_cache()) or pause a tag, then call again");
  error.device = device.ordinal();
  error.needed_bytes = needed_bytes;
  error.free_bytes = free_bytes;
  error.call = "cuMemCreate";
  error.cuda_error = CUDA_ERROR_OUT_OF_MEMORY;
  return error;
}

}  // namespace memsaver
