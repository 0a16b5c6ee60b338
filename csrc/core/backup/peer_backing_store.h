// peer_backing_store: backups in another device's memory, or in host memory if that device is full.
#pragma once

#include <map>

#include "core/backup/backing_store.h"
#include "core/backup/host_backing_store.h"
#include "core/driver/device.h"
#include "core/driver/handles.h"

namespace memsaver {

// Each chunk is either entirely in the neighbor's memory (neighbour.h), at addresses that both
// devices can access, or entirely in pinned host memory. A claim determines the place of a new
// chunk, which does not change until the chunk is dropped. The device copies to and from both kinds
// of chunks directly.
class PeerBackingStore : public BackingStore {
 public:
  explicit PeerBackingStore(const Device& device)
      : device_(device), host_(HostBackingStore::Kind::kPinned, device) {}

  void cover(const std::vector<VaReservation>& spans) override { host_.cover(spans); }
  void claim(const std::vector<Range>& chunks) override;
  void populate(const Range& part) override;
  void attach(const Range& chunk) override;
  void drop(const Range& chunk) override;
  uint64_t peer_bytes(const Range& chunk) const override;
  uint64_t peer(uint64_t address) const override;
  void* direct(uint64_t address) const override { return host_.direct(address); }
  void* view(uint64_t) const override { return nullptr; }  // a tensor may be divided between both
  void write(uint64_t address, const void* source, uint64_t bytes) override;
  void read(uint64_t address, void* target, uint64_t bytes) override;

 private:
  struct PeerChunk {
    Range bounds;
    VaReservation addresses;
    Mapping mapping;  // after `addresses`, so that it is destroyed before them
  };
  using PeerChunks = std::map<uint64_t, PeerChunk>;  // by the chunk's address

  // Allocates the neighbor's memory for the chunks that fit into it. Throws kDriverFailed.
  static PeerChunks allocate(Device& neighbour, const std::vector<Range>& chunks);
  const PeerChunk* around(uint64_t address) const;

  const Device& device_;
  HostBackingStore host_;
  PeerChunks peer_chunks_;
};

}  // namespace memsaver
