#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "kernels/fingerprint_host.h"
#include "state.h"
#include "transfer.h"

namespace memsaver::sim {
namespace {

using namespace fingerprint;

// Like transfer.h's resolve, but only for pinned host memory.
bool reach(const Range& range, int device, bool write, std::vector<Span>* spans) {
  const State& shared = state();
  if (!shared.space.owns(range.address) && !shared.host.contains(range)) return false;
  return resolve(range, device, write, spans);
}

bool read_pieces(const Operation& launch, int device, std::vector<FingerprintPiece>* pieces) {
  std::vector<Span> spans;
  if (!reach(launch.source, device, false, &spans)) return false;
  pieces->resize(launch.source.size / sizeof(FingerprintPiece));
  return fetch(spans, pieces->data());
}

}  // namespace

bool is_image(const void* image) {
  const char* at = static_cast<const char*>(image);
  constexpr char kFatbin[] = {'\x50', '\xed', '\x55', '\xba'};
  constexpr char kElf[] = {'\x7f', 'E', 'L', 'F'};
  // Compares byte by byte, because the text may have fewer than four bytes.
  const auto begins = [&](const char* magic, size_t size) {
    return std::mismatch(magic, magic + size, at).first == magic + size;
  };
  if (begins(kFatbin, sizeof kFatbin) || begins(kElf, sizeof kElf)) return true;
  while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r') ++at;
  return begins("//", 2) || begins(".version", 8);
}

bool is_kernel(const char* name) { return std::strcmp(name, "ms_fingerprint") == 0; }

bool prepare_launch(unsigned blocks, unsigned threads, void* const* arguments, Operation* launch) {
  if (threads != kThreads) return false;
  CUdeviceptr pieces = 0, digests = 0;
  uint32_t count = 0;
  std::memcpy(&pieces, arguments[0], sizeof pieces);
  std::memcpy(&digests, arguments[1], sizeof digests);
  std::memcpy(&count, arguments[2], sizeof count);
  const uint64_t done = std::min<uint64_t>(count, uint64_t{blocks} * kPiecesPerBlock);
  launch->kind = Operation::Kind::kLaunch;
  launch->source = {pieces, done * sizeof(FingerprintPiece)};
  launch->destination = {digests, done * sizeof(Digest)};
  return true;
}

void note_reads(Operation* launch, int device) {
  launch->reads.clear();
  std::vector<FingerprintPiece> pieces;
  if (!read_pieces(*launch, device, &pieces)) return;  // the launch reports it when it runs
  for (const FingerprintPiece& piece : pieces) {
    if (piece.bytes > 0) launch->reads.push_back({piece.address, piece.bytes});
  }
}

bool run_launch(Lock* lock, const Operation& launch, int device, Range* culprit) {
  std::vector<FingerprintPiece> pieces;
  std::vector<Span> into;
  *culprit = launch.source;
  if (launch.source.size == 0) return true;
  if (!read_pieces(launch, device, &pieces)) return false;
  *culprit = launch.destination;
  if (!reach(launch.destination, device, true, &into)) return false;
  std::vector<std::vector<Span>> from(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    *culprit = {pieces[i].address, pieces[i].bytes};
    if (pieces[i].bytes > kFingerprintBytes) return false;
    if (pieces[i].bytes > 0 && !reach(*culprit, device, false, &from[i])) return false;
  }
  lock->unlock();
  bool fine = true;
  std::vector<char> bytes(kFingerprintBytes);
  std::vector<Digest> digests(pieces.size());
  for (size_t i = 0; i < pieces.size() && fine; ++i) {
    *culprit = {pieces[i].address, pieces[i].bytes};
    fine = fetch(from[i], bytes.data());
    if (fine) digests[i] = fingerprint_of(bytes.data(), pieces[i].bytes);
  }
  if (fine) {
    *culprit = launch.destination;
    fine = store(digests.data(), into);
  }
  lock->lock();
  return fine;
}

}  // namespace memsaver::sim
