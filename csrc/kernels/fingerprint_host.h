// fingerprint_host: the fingerprint of a piece of host memory, equal to the kernel's result on a
// device.
#pragma once

#include <stdint.h>

#include <cstring>
#include <vector>

#include "kernels/fingerprint_hash.h"

namespace memsaver {

// Adds the complete chunks in the first `size` bytes. Returns the number of added bytes. Sanitizer
// builds do not instrument this loop (build_support/variants.py).
MS_FINGERPRINT_FUNCTION uint32_t add_chunks(uint64_t lanes[fingerprint::kLanes], const char* at,
                                            uint64_t size, const uint32_t* key) {
  using namespace fingerprint;
  uint32_t offset = 0;
  for (; offset + kChunkBytes <= size; offset += kChunkBytes) {
    uint32_t words[4];
    std::memcpy(words, at + offset, sizeof words);
    add_chunk(lanes, words, key + offset / 4);
  }
  return offset;
}

// Returns the fingerprint of `size` bytes, which must be at most kFingerprintBytes. Any thread. The
// first call allocates a table of 1 MiB.
inline Digest fingerprint_of(const void* bytes, uint64_t size) {
  using namespace fingerprint;
  static const std::vector<uint32_t>* const table = [] {
    auto* const words = new std::vector<uint32_t>(kFingerprintBytes / 4 + kKeyWords);
    for (uint32_t i = 0; i < words->size(); ++i) (*words)[i] = key_word(i);
    return words;
  }();
  const uint32_t* const key = table->data();
  const char* const at = static_cast<const char*>(bytes);
  Digest digest{};
  // The last chunk is added here, even if it is complete. Sanitizers check this access, but not the
  // accesses in add_chunks(), and therefore detect a `size` that exceeds the memory.
  const uint32_t offset = size == 0 ? 0 : add_chunks(digest.lanes, at, size - 1, key);
  if (offset < size) {
    const uint32_t rest = static_cast<uint32_t>(size) - offset;
    uint32_t words[4] = {0, 0, 0, 0};
    std::memcpy(words, at + offset, rest);
    add_part(digest.lanes, words, offset, rest);
  }
  for (int lane = 0; lane < kLanes; ++lane) digest.lanes[lane] += length_term(size, lane);
  return digest;
}

}  // namespace memsaver
