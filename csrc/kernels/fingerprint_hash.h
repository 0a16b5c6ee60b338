// fingerprint_hash: the arithmetic of the 256-bit fingerprint of a piece of memory, written once
// for CUDA C++ (fingerprint.cu) and plain C++ (the simulator).
//
// A piece is a sequence of little-endian 32-bit words m[0..n), padded with zeros to whole pairs.
// Lane l of its fingerprint, of four, is
//
//   sum over pairs i of (m[2i] + k[2i + 2l]) * (m[2i + 1] + k[2i + 1 + 2l])  +  bytes * c[l]
//
// with the additions inside modulo 2^32, the products exact and the sum modulo 2^64: UMAC's NH with
// a Toeplitz key (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC: Fast and Secure Message
// Authentication", CRYPTO 1999), and a term for the length. The result depends only on the bytes
// and their offsets in the piece, not on the piece's address or on how threads divide the work.
//
// Under a random key, two different pieces of equal length agree in one lane with a probability of
// at most 2^-32, and in all four with at most 2^-128, whatever their length (the paper's theorem on
// NH^T). The key here is pseudo-random and fixed, so that all processes compute the same result:
// the bound applies to contents that were not chosen with knowledge of the key, such as weights. It
// does not protect against deliberately constructed collisions.
#pragma once

#include <stdint.h>

// The qualifiers of a function for several targets; fingerprint.cu defines them.
#ifndef MS_FINGERPRINT_FUNCTION
#define MS_FINGERPRINT_FUNCTION inline
#endif

namespace memsaver {

// The largest size of a piece.
constexpr uint64_t kFingerprintBytes = 1 << 20;

// The kernel's input and output, in host memory that the device can access.
struct alignas(16) FingerprintPiece {
  uint64_t address, bytes;
};
struct alignas(16) Digest {
  uint64_t lanes[4];
};

inline bool operator==(const Digest& a, const Digest& b) {
  return a.lanes[0] == b.lanes[0] && a.lanes[1] == b.lanes[1] && a.lanes[2] == b.lanes[2] &&
         a.lanes[3] == b.lanes[3];
}
inline bool operator!=(const Digest& a, const Digest& b) { return !(a == b); }

namespace fingerprint {

constexpr int kLanes = 4;

// The message is processed in chunks of 16 bytes: two pairs of words, for which the lanes need ten
// words of the key.
constexpr uint32_t kChunkBytes = 16;
constexpr int kKeyWords = 4 + 2 * (kLanes - 1);

// The kernel's launch configuration: (count + 3) / 4 blocks of kThreads threads, no dynamic shared
// memory.
constexpr uint32_t kPiecesPerBlock = 4;
constexpr uint32_t kThreads = 256;

// k[index]: MurmurHash3's 32-bit finaliser (Appleby, public domain), a bijection.
MS_FINGERPRINT_FUNCTION uint32_t key_word(uint32_t index) {
  uint32_t x = index ^ 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  x ^= x >> 16;
  return x;
}

// The key for the chunk that begins `offset` bytes into a piece.
MS_FINGERPRINT_FUNCTION void chunk_key(uint32_t offset, uint32_t key[kKeyWords]) {
  for (int i = 0; i < kKeyWords; ++i) key[i] = key_word(offset / 4 + static_cast<uint32_t>(i));
}

MS_FINGERPRINT_FUNCTION uint64_t product(uint32_t even, uint32_t odd, const uint32_t* key) {
  return static_cast<uint64_t>(even + key[0]) * static_cast<uint64_t>(odd + key[1]);
}

// Adds a chunk's first pair (add_pair) or both pairs (add_chunk).
MS_FINGERPRINT_FUNCTION void add_pair(uint64_t lanes[kLanes], const uint32_t words[4],
                                      const uint32_t key[kKeyWords]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] += product(words[0], words[1], key + 2 * lane);
  }
}
MS_FINGERPRINT_FUNCTION void add_chunk(uint64_t lanes[kLanes], const uint32_t words[4],
                                       const uint32_t key[kKeyWords]) {
  add_pair(lanes, words, key);
  add_pair(lanes, words + 2, key + 2);
}

// Adds the chunk at `offset` of a piece, of which only `bytes` bytes (1 to 16) belong to the piece;
// the rest of `words` is zero.
MS_FINGERPRINT_FUNCTION void add_part(uint64_t lanes[kLanes], const uint32_t words[4],
                                      uint32_t offset, uint32_t bytes) {
  uint32_t key[kKeyWords];
  chunk_key(offset, key);
  add_pair(lanes, words, key);
  if (bytes > 8) add_pair(lanes, words + 2, key + 2);
}

// The length's contribution to a lane, so that a piece differs from one with appended zeros.
MS_FINGERPRINT_FUNCTION uint64_t length_term(uint64_t bytes, int lane) {
  return bytes * (0x9e3779b97f4a7c15ull + 2 * static_cast<uint64_t>(lane));
}

}  // namespace fingerprint
}  // namespace memsaver
