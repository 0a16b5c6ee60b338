// model: the stress test's model of its tags and blocks, with their expected contents and locks.
//
// Threads that access a tag's blocks acquire the tag's `contents` lock in shared mode. Threads that
// pause or resume the tag acquire this lock exclusively. Allocations, frees and queries acquire no
// lock. Each block belongs to one thread, and only this thread writes, checks and frees the block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <shared_mutex>
#include <string>

#include "memsaver_inspection.h"
#include "memsaver_sharing.h"
#include "memsaver_transitions.h"

namespace stress {

struct Tag {
  std::string name;
  int policy;
  std::shared_mutex contents;

  // Guarded by `contents`.
  bool paused = false;
  uint64_t losses = 0;  // pauses without a backup, and failures that might have lost contents
  uint64_t doubts = 0;  // `losses` at the last failure that might have lost contents
};

enum class Filling { kUnknown, kPattern, kByte };

struct Block {
  void* pointer = nullptr;
  uint64_t bytes = 0;
  int tag = 0, device = 0;
  Filling filling = Filling::kUnknown;
  uint64_t value = 0;   // the seed of a pattern, or the byte
  uint64_t losses = 0;  // the tag's value when the block was filled
};

__attribute__((no_sanitize("address", "undefined", "thread"))) inline uint64_t mixed(uint64_t x) {
  x ^= x >> 31;
  x *= 0x9E3779B97F4A7C15;
  x ^= x >> 29;
  return x;
}

// A part of a pattern, whose words depend on the seed and on their offsets. A part is generated in
// a buffer without sanitizer checks, because a sanitizer would check each word.
struct Part {
  uint64_t words[512];
  uint64_t bytes;

  __attribute__((no_sanitize("address", "undefined", "thread"))) Part(uint64_t seed,
                                                                      uint64_t offset, uint64_t end)
      : bytes(end - offset < sizeof(words) ? end - offset : sizeof(words)) {
    for (uint64_t i = 0; i * 8 < bytes; ++i) words[i] = mixed(seed + offset + 8 * i);
  }
};
inline void write_pattern(void* at, uint64_t bytes, uint64_t seed) {
  auto* to = static_cast<unsigned char*>(at);
  for (uint64_t offset = 0; offset < bytes; offset += sizeof(Part::words)) {
    const Part part(seed, offset, bytes);
    std::memcpy(to + offset, part.words, part.bytes);
  }
}

// Returns the first offset at which memory differs from the pattern or the byte, or `bytes` if the
// memory does not differ.
inline uint64_t unlike_pattern(const void* at, uint64_t bytes, uint64_t seed) {
  const auto* from = static_cast<const unsigned char*>(at);
  for (uint64_t offset = 0; offset < bytes; offset += sizeof(Part::words)) {
    const Part part(seed, offset, bytes);
    if (std::memcmp(from + offset, part.words, part.bytes) == 0) continue;
    const auto* right = reinterpret_cast<const unsigned char*>(part.words);
    const auto* wrong = std::mismatch(right, right + part.bytes, from + offset).first;
    return offset + static_cast<uint64_t>(wrong - right);
  }
  return bytes;
}
inline uint64_t unlike_byte(const void* at, uint64_t bytes, unsigned char byte) {
  const auto* from = static_cast<const unsigned char*>(at);
  if (bytes == 0 || (from[0] == byte && std::memcmp(from, from + 1, bytes - 1) == 0)) return bytes;
  uint64_t offset = 0;
  while (from[offset] == byte) ++offset;
  return offset;
}

// Returns a description of the first error in memory or a backup that should contain a block's
// contents, or "" without an error. `lost` is the byte in discarded memory: 0, or 0xFF with
// `poison`.
inline std::string fault_in(const Tag& tag, const Block& block, const void* at,
                            unsigned char lost) {
  if (block.filling == Filling::kUnknown || block.losses < tag.doubts) return "";
  const bool given_up = block.losses < tag.losses;
  const bool pattern = !given_up && block.filling == Filling::kPattern;
  const auto byte = given_up ? lost : static_cast<unsigned char>(block.value);
  const uint64_t offset =
      pattern ? unlike_pattern(at, block.bytes, block.value) : unlike_byte(at, block.bytes, byte);
  if (offset >= block.bytes) return "";
  return "a block of " + tag.name + " on device " + std::to_string(block.device) + " with " +
         std::to_string(block.bytes) + " bytes should contain " +
         (pattern ? "its pattern" : "bytes " + std::to_string(byte)) +
         (given_up ? " since it was discarded" : "") + ", and at " + std::to_string(offset) +
         " there is " + std::to_string(static_cast<const unsigned char*>(at)[offset]);
}

}  // namespace stress
