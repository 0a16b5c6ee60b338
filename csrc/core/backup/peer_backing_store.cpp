#include "core/backup/peer_backing_store.h"

#include <string>
#include <utility>

#include "core/driver/neighbour.h"
#include "core/platform/options.h"
#include "core/platform/status.h"

namespace memsaver {
namespace {

[[noreturn]] void not_staged() {
  throw Error(Status::kInternal, "a backup on another device is not copied through a buffer");
}

// Appended to the message of a driver call that failed on the neighbor.
constexpr const char* kAdvice =
    "; the call was for the backup on another device (backup='peer'): use backup='host' if it "
    "fails again";

}  // namespace

void PeerBackingStore::claim(const std::vector<Range>& chunks) {
  if (chunks.empty()) return;
  PeerChunks fresh;
  try {
    if (Device* const neighbour = neighbour_of(device_)) fresh = allocate(*neighbour, chunks);
  } catch (Error& error) {
    if (error.status == Status::kDriverFailed) error.addition = kAdvice;
    if (error.status != Status::kOutOfDeviceMemory) throw;  // or no room for a context
  }
  std::vector<Range> rest;
  for (const Range& chunk : chunks) {
    if (fresh.find(chunk.address) == fresh.end()) rest.push_back(chunk);
  }
  host_.claim(rest);
  peer_chunks_.merge(fresh);
}

PeerBackingStore::PeerChunks PeerBackingStore::allocate(Device& neighbour,
                                                        const std::vector<Range>& chunks) {
  PeerChunks made;
  const uint64_t unit = neighbour.granularity(), margin = option(Option::peer_margin_bytes);
  const std::vector<CUmemAccessDesc> access = neighbour.access();
  const auto room = neighbour.lock_room();
  const uint64_t free_bytes = neighbour.memory().free_bytes;
  uint64_t spare = free_bytes > margin ? free_bytes - margin : 0;
  try {
    for (const Range& chunk : chunks) {
      const uint64_t bytes = (chunk.bytes + unit - 1) / unit * unit;
      if (bytes > spare) continue;
      PeerChunk& added = made[chunk.address];
      added.bounds = chunk;
      added.addresses = VaReservation::reserve(bytes, unit);
      added.mapping =
          Mapping::map(added.addresses.address(), PhysicalMemory::create(neighbour, bytes), access);
      spare -= bytes;
    }
  } catch (const Error& error) {
    if (error.status != Status::kOutOfDeviceMemory) throw;
    for (auto chunk = made.begin(); chunk != made.end();) {
      chunk = chunk->second.mapping.bytes() == 0 ? made.erase(chunk) : std::next(chunk);
    }
  }
  return made;
}

const PeerBackingStore::PeerChunk* PeerBackingStore::around(uint64_t address) const {
  const auto behind = peer_chunks_.upper_bound(address);
  if (behind == peer_chunks_.begin()) return nullptr;
  const PeerChunk& before = std::prev(behind)->second;
  return address < before.bounds.end() ? &before : nullptr;
}

void PeerBackingStore::populate(const Range& part) {
  if (!around(part.address)) host_.populate(part);
}

void PeerBackingStore::attach(const Range& chunk) {
  if (!around(chunk.address)) host_.attach(chunk);
}

void PeerBackingStore::drop(const Range& chunk) {
  if (peer_chunks_.erase(chunk.address) == 0) host_.drop(chunk);
}

uint64_t PeerBackingStore::peer_bytes(const Range& chunk) const {
  const PeerChunk* const found = around(chunk.address);
  return found ? found->mapping.bytes() : 0;
}

uint64_t PeerBackingStore::peer(uint64_t address) const {
  const PeerChunk* const found = around(address);
  return found ? found->mapping.address() + (address - found->bounds.address) : 0;
}

void PeerBackingStore::write(uint64_t, const void*, uint64_t) { not_staged(); }

void PeerBackingStore::read(uint64_t, void*, uint64_t) { not_staged(); }

}  // namespace memsaver
