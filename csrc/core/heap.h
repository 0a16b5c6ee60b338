// heap: the memory of one tag on one device: which addresses are handed out, and which of them have
// memory.
//
//   span    a large reserved range of addresses; a heap has one, and more when it outgrows it
//   block   what one allocation got: a part of a span, of 512 bytes or a multiple
//   extent  a mapping: one piece of physical memory, somewhere under the blocks
//
// Blocks lie side by side and extents tile the address range under them, on boundaries of their
// own: that is what lets 10,000 small tensors be paused as a few dozen pieces (the number of pieces
// is what a pause costs), and what lets a resume choose other pieces than the pause gave back.
// Every byte of a block of a mapped heap is covered by an extent; an extent under no block does not
// exist.
//
// A Heap is geometry: plan_* only compute, commit_* only record what the caller did meanwhile; no
// driver call is made here. Not thread-safe: plans and commits happen under the registry's lock,
// and between a plan and its commit the caller holds the tag (registry.h), so that nothing moves.
// Addresses and sizes are bytes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/handles.h"
#include "core/range.h"

namespace memsaver {

// Blocks are multiples of this, as cudaMalloc's alignment promises at least 256 and torch expects
// 512.
constexpr uint64_t kBlockBytes = 512;

// Spans are aligned to this and a multiple of it: a slot of the address table (registry.h).
constexpr uint64_t kSlotBytes = 32ull << 30;

// Physical memory comes in pieces of at most this. On an H200, 64 GiB in pieces of 2 GiB are
// unmapped and mapped in 1.2 and 2.4 ms, in pieces of 1 GiB in 1.8 and 3.4 ms; from 4 GiB on
// releasing them takes longer. 3 GiB because two layers of an 8B model's KV cache (1.22 GiB each)
// fit into that, and not into 2: SGLang's cache of such layers was released in 31 ms then.
constexpr uint64_t kPieceBytes = 3ull << 30;

class Heap {
 public:
  struct Block {
    uint64_t bytes;
    bool doomed;  // freed; gone when the holder of the tag lets go
  };

  explicit Heap(Device& device) : device_(&device) {}

  Device& device() const { return *device_; }

  // --- allocation
  struct Placement {
    Range block;  // unset (bytes 0) where no span has room: commit a new span and plan again
    std::vector<Range>
        missing;               // extents to map first, each a multiple of the granularity, generous
    std::vector<Range> least;  // the same, as little as will do
  };
  // Where an allocation would go. A block of `slab_bytes` or more gets extents of its own; smaller
  // ones share extents that grow with the heap, up to `slab_bytes`.
  Placement plan_block(uint64_t bytes, uint64_t slab_bytes) const;
  // Both change nothing where they throw std::bad_alloc; the span stays with the caller then.
  void commit_span(VaReservation&& span);
  void commit_block(const Range& block, std::map<uint64_t, Mapping>& mapped);

  // --- free
  const Block* find(uint64_t address) const;  // the block that starts there, or null
  std::optional<Range> block_around(uint64_t address) const;
  void doom(uint64_t block) noexcept;  // needs no memory: a free cannot fail
  const std::vector<uint64_t>& doomed() const { return doomed_; }
  // The extents that nothing needs once `blocks` are gone.
  std::vector<uint64_t> plan_free(const std::vector<uint64_t>& blocks) const;
  // Takes those extents out, for the caller to destroy.
  std::map<uint64_t, Mapping> take_extents(const std::vector<uint64_t>& extents) noexcept;
  // Each of them doomed, and stays so where it throws std::bad_alloc.
  void commit_free(const std::vector<uint64_t>& blocks);

  bool needs(const Range& range) const;  // a block lies in it, doomed or not

  // --- pause and resume
  std::vector<Range> live() const;  // blocks that are not doomed, in address order
  std::vector<Range> live_within(const Range& window) const;  // the parts of them in it
  // How a resume maps the live blocks: pieces on block boundaries where neighbours share up to
  // `share_bytes`, larger blocks on their own, no piece above kPieceBytes.
  std::vector<Range> plan_tiles(uint64_t share_bytes) const;
  // These two allocate nothing and cannot fail, so that a transition's commit cannot.
  void commit_extents(std::map<uint64_t, Mapping>& mapped) noexcept;  // takes them all
  std::map<uint64_t, Mapping> take_all_extents() noexcept;
  const std::map<uint64_t, Mapping>& extents() const { return extents_; }

  const std::vector<VaReservation>& spans() const { return spans_; }
  uint64_t allocations() const { return blocks_.size(); }
  uint64_t allocated_bytes() const { return allocated_bytes_; }
  uint64_t resident_bytes() const;

 private:
  // The places of a free range in the two maps, so that changing these needs no memory.
  struct FreePlaces {
    std::map<uint64_t, uint64_t>::node_type by_address;
    std::set<std::pair<uint64_t, uint64_t>>::node_type by_size;
  };
  static FreePlaces make_places();
  FreePlaces take_free(std::map<uint64_t, uint64_t>::iterator at) noexcept;
  void put_free(FreePlaces places, const Range& range) noexcept;
  void add_free(FreePlaces places, Range range) noexcept;
  void remove_free(FreePlaces spare, const Range& range) noexcept;
  bool starts_span(uint64_t address) const;
  uint64_t slab(uint64_t slab_bytes) const;
  bool fits_alone(const Range& free, uint64_t need, uint64_t* start) const;
  std::vector<Range> uncovered(uint64_t begin, uint64_t end) const;

  Device* device_;
  std::vector<VaReservation> spans_;
  std::map<uint64_t, Block> blocks_;  // by address
  std::vector<uint64_t> doomed_;  // addresses of the doomed among them; has room for all of them
  std::map<uint64_t, uint64_t> free_;                // address -> bytes, neighbours joined
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // the same as (bytes, address)
  std::map<uint64_t, Mapping>
      extents_;  // by address; after spans_, so unmapped before they are freed
  uint64_t allocated_bytes_ = 0;
  uint64_t extent_bytes_ = 0;
};

}  // namespace memsaver
