// fingerprint: the kernel that finds the fingerprints of many pieces of device memory.
//
//   ms_fingerprint<<<(count + 3) / 4, kThreads>>>(pieces, digests, count)
//
// A block does four pieces at once, whole. A thread takes the same places of each, so that the key
// for them, which costs as much as the sums of three pieces, is found once. `pieces` and `digests`
// may lie in host memory: a block reads its pieces once and writes their digests once. Addresses
// that are not multiples of 16 are read in smaller bits, at a fraction of the speed.
#define MS_FINGERPRINT_FUNCTION __device__ __forceinline__
#include "kernels/fingerprint_hash.h"

using memsaver::Digest;
using memsaver::FingerprintPiece;
using namespace memsaver::fingerprint;

namespace {

constexpr uint32_t kStride = kThreads * kChunkBytes;  // from one chunk of a thread to its next
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xffffffffu;

// Of one thread: its sums for each piece, and the chunks that are on their way to it.
struct Work {
  uint64_t address[kPiecesPerBlock];
  uint32_t bytes[kPiecesPerBlock];  // that are read in aligned chunks
  uint64_t sums[kPiecesPerBlock][kLanes];
  uint4 next[kPiecesPerBlock];
};

// Fetches the chunks at `offset` of those pieces that reach so far; kSure: all do.
template <bool kSure>
__device__ __forceinline__ void fetch(Work& work, uint32_t offset) {
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
    if (kSure || offset < work.bytes[p]) {
      work.next[p] = __ldcs(reinterpret_cast<const uint4*>(work.address[p] + offset));
    }
  }
}

// Sums the chunks at `offset`, which were fetched, while those after them are.
template <bool kSure>
__device__ __forceinline__ void step(Work& work, uint32_t offset) {
  uint4 chunks[kPiecesPerBlock];
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) chunks[p] = work.next[p];
  fetch<kSure>(work, offset + kStride);
  uint32_t key[kKeyWords];
  chunk_key(offset, key);
#pragma unroll
  for (int i = 0; i < kKeyWords; ++i) {
    asm volatile("" : "+r"(key[i]));  // found here, not once more for each piece that needs it
  }
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
    if (!kSure && offset >= work.bytes[p]) continue;
    const uint32_t words[4] = {chunks[p].x, chunks[p].y, chunks[p].z, chunks[p].w};
    add_chunk(work.sums[p], words, key);
  }
}

// The chunk of `left` bytes, up to 16, at any address, as words.
__device__ __forceinline__ void read_part(uint64_t address, uint32_t left, uint32_t words[4]) {
  if (left == kChunkBytes && address % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __ldcs(reinterpret_cast<const uint32_t*>(address) + i);
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < kChunkBytes; ++i) {
    const uint32_t byte = i < left ? __ldcs(reinterpret_cast<const uint8_t*>(address) + i) : 0;
    words[i / 4] = (i % 4 == 0 ? 0 : words[i / 4]) | byte << (8 * (i % 4));
  }
}

// Adds up `count` sums of each thread of the warp, in its first.
template <int kCount>
__device__ __forceinline__ void sum_warp(uint64_t* sums) {
#pragma unroll 1
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += __shfl_down_sync(kAll, sums[i], distance);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    ms_fingerprint(const FingerprintPiece* pieces, Digest* digests, uint32_t count) {
  __shared__ FingerprintPiece mine[kPiecesPerBlock];
  __shared__ uint64_t sums[kPiecesPerBlock][kLanes][kWarps];

  const uint32_t thread = threadIdx.x;
  const uint32_t start = thread * kChunkBytes;
  const uint32_t first = blockIdx.x * kPiecesPerBlock;
  if (thread < kPiecesPerBlock) {
    const bool exists = first + thread < count;
    mine[thread].address = exists ? pieces[first + thread].address : 0;
    mine[thread].bytes = exists ? pieces[first + thread].bytes : 0;
  }
  __syncthreads();

  Work work = {};
  uint32_t shortest = UINT32_MAX, longest = 0;
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
    work.address[p] = mine[p].address;
    const uint32_t bytes = static_cast<uint32_t>(mine[p].bytes);
    work.bytes[p] = work.address[p] % kChunkBytes == 0 ? bytes / kChunkBytes * kChunkBytes : 0;
    shortest = min(shortest, work.bytes[p]);
    longest = max(longest, work.bytes[p]);
  }
  uint32_t offset = start;
  fetch<false>(work, offset);
#pragma unroll 2
  for (; offset + kStride < shortest; offset += kStride) step<true>(work, offset);
#pragma unroll 1
  for (; offset < longest; offset += kStride) step<false>(work, offset);

  sum_warp<kPiecesPerBlock * kLanes>(&work.sums[0][0]);
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (thread % 32 == 0) sums[p][lane][thread / 32] = work.sums[p][lane];
    }
  }
  // What is left of each piece: its last bytes, or all of it where it is not aligned.
#pragma unroll 1
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
    const uint64_t address = mine[p].address;
    const uint32_t bytes = static_cast<uint32_t>(mine[p].bytes);
    offset = (address % kChunkBytes == 0 ? bytes / kChunkBytes * kChunkBytes : 0) + start;
    if (!__any_sync(kAll, offset < bytes)) continue;
    uint64_t rest[kLanes] = {};
#pragma unroll 1
    for (; offset < bytes; offset += kStride) {
      const uint32_t left = min(bytes - offset, kChunkBytes);
      uint32_t words[4];
      read_part(address + offset, left, words);
      add_part(rest, words, offset, left);
    }
    sum_warp<kLanes>(rest);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (thread % 32 == 0) sums[p][lane][thread / 32] += rest[lane];
    }
  }
  __syncthreads();

  if (thread < kPiecesPerBlock && first + thread < count) {
    Digest digest;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      uint64_t sum = length_term(mine[thread].bytes, lane);
      for (uint32_t warp = 0; warp < kWarps; ++warp) sum += sums[thread][lane][warp];
      digest.lanes[lane] = sum;
    }
    digests[first + thread] = digest;
  }
}
