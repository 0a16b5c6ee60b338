// Runs the fingerprint kernel's source on the CPU. Reads from its input
//
//   count, then count times: misalignment, bytes        each 64 bits
//   the bytes of all pieces
//
// places each piece at a 16-byte boundary plus its misalignment, and writes the digests.
#include <cstdio>

#include "cuda_on_threads.h"
#include "kernels/fingerprint.cu"

namespace {

template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) __builtin_trap();
  return values;
}

}  // namespace

int main() {
  const uint32_t count = static_cast<uint32_t>(read<uint64_t>(1)[0]);
  const std::vector<uint64_t> given = read<uint64_t>(2 * count);
  std::vector<FingerprintPiece> pieces;
  std::vector<std::unique_ptr<char[]>> memory;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t misalignment = given[2 * i], bytes = given[2 * i + 1];
    memory.push_back(std::make_unique<char[]>(bytes + 32));
    const uint64_t base = reinterpret_cast<uint64_t>(memory.back().get());
    const uint64_t address = (base + 15) / 16 * 16 + misalignment;
    const std::vector<char> contents = read<char>(bytes);
    std::memcpy(reinterpret_cast<void*>(address), contents.data(), bytes);
    pieces.push_back({address, bytes});
  }
  std::vector<Digest> digests(count);
  const uint32_t blocks = (count + kPiecesPerBlock - 1) / kPiecesPerBlock;
  launch(ms_fingerprint, blocks, kThreads, pieces.data(), digests.data(), count);
  std::fwrite(digests.data(), sizeof(Digest), count, stdout);
}
