// fingerprint: the kernel that computes the fingerprints of many pieces of device memory.
//
//   ms_fingerprint<<<(count + 3) / 4, kThreads>>>(pieces, digests, count)
//
// A block processes four whole pieces at once. A thread processes the same offsets of each piece,
// so that the key for these offsets, which costs as much as the sums of three pieces, is computed
// once. `pieces` and `digests` may be in host memory: a block reads its pieces once and writes
// their digests once. Memory at addresses that are not multiples of 16 is read in smaller units, at
// a fraction of the speed.
#define MS_FINGERPRINT_FUNCTION __device__ __forceinline__
#include "kernels/fingerprint_hash.h"

using memsaver::Digest;
using memsaver::FingerprintPiece;
using namespace memsaver::fingerprint;

namespace {

constexpr uint32_t kStride = kThreads * kChunkBytes;  // from one chunk of a thread to its next
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xffffffffu;

// The state of one thread: its sums for each piece, and the chunks that are being loaded.
struct Work {
  uint64_t address[kPiecesPerBlock];
  uint32_t bytes[kPiecesPerBlock];  // the bytes that are read in aligned chunks
  uint64_t sums[kPiecesPerBlock][kLanes];
  uint4 next[kPiecesPerBlock];
};

// Loads the chunks at `offset` of the pieces that are long enough; kSure: all pieces are.
template <bool kSure>
__device__ __forceinline__ void fetch(Work& work, uint32_t offset) {
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
    if (kSure || offset < work.bytes[p]) {
      work.next[p] = __ldcs(reinterpret_cast<const uint4*>(work.address[p] + offset));
    }
  }
}

// Adds the loaded chunks at `offset` to the sums, while the next chunks are being loaded.
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
    asm volatile("" : "+r"(key[i]));  // computed here, not again for each piece that needs it
  }
#pragma unroll
  for (uint32_t p = 0; p < kPiecesPerBlock; ++p) {
    if (!kSure && offset >= work.bytes[p]) continue;
    const uint32_t words[4] = {chunks[p].x, chunks[p].y, chunks[p].z, chunks[p].w};
    add_chunk(work.sums[p], words, key);
  }
}

// Reads a chunk of `left` bytes (up to 16) at any address, as words.
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

// Adds up `kCount` sums over the threads of the warp, into its first thread.
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
  // The rest of each piece: its last bytes, or all of it if it is not aligned.
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
