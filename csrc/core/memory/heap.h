// heap: the memory of one tag on one device, that is, its address ranges and the physical memory in
// them.
//
// A span is a large reserved range of addresses; a heap that outgrows its first span gets more
// spans. A block is an allocation: a part of a span whose size is a multiple of 512 bytes. An
// extent is a mapping: one piece of physical memory under one or more blocks.
//
// Blocks are adjacent; extents cover the same addresses without gaps, but have different
// boundaries. Therefore, 10,000 small tensors can be paused as a few dozen extents, and a resume
// can map extents that differ from the extents that the pause released. The number of extents
// determines the cost of a pause. In a mapped heap, every byte of a block is covered by an extent,
// and every extent is under at least one block.
//
// A Heap only computes and records addresses and makes no driver calls. plan_* functions only
// compute; commit_* functions only record the work that the caller did after the plan. Not
// thread-safe: plans and commits run under the registry's lock. Between a plan and its commit, the
// caller owns a Hold (allocation.h) on the tag, so that the heap does not change. Addresses and
// sizes are in bytes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/driver/handles.h"
#include "core/platform/range.h"

namespace memsaver {

// The granularity of blocks, in bytes. cudaMalloc guarantees an alignment of at least 256 bytes,
// and torch expects 512 bytes.
constexpr uint64_t kBlockBytes = 512;

// The alignment and granularity of spans: one slot of the address table (registry.h).
constexpr uint64_t kSlotBytes = 32ull << 30;

// The largest size of one piece of physical memory. On an H200, unmapping and mapping 64 GiB takes
// 1.2 and 2.4 ms in pieces of 2 GiB, and 1.8 and 3.4 ms in pieces of 1 GiB. Releasing pieces of 4
// GiB or more takes longer. Two layers of an 8B model's KV cache (1.22 GiB each) fit into a piece
// of 3 GiB, but only one layer fits into a piece of 2 GiB. With pieces of 3 GiB, SGLang's cache of
// such layers was released in 31 ms.
constexpr uint64_t kPieceBytes = 3ull << 30;

class Heap {
 public:
  struct Block {
    uint64_t bytes;
    bool is_large;  // excluded from small_bytes()
    bool is_freed;  // a pending free: the owner of the tag's Hold completes it
  };

  explicit Heap(Device& device) : device_(&device) {}

  Device& device() const { return *device_; }

  // --- allocation
  struct Placement {
    Range block;  // empty if no span has room: commit a new span and plan again
    bool is_large = false;
    std::vector<Range> missing;  // extents to map first, in multiples of the granularity
    std::vector<Range> least;    // the smallest such extents, without room for later blocks
  };
  // Returns the place for an allocation. A block of at least `large_bytes` bytes is large: it uses
  // free memory that is mapped, or else gets its own extents. Smaller blocks share extents of about
  // `slab_bytes`.
  Placement plan_block(uint64_t bytes, uint64_t large_bytes, uint64_t slab_bytes) const;
  // If one of the next two functions throws std::bad_alloc, nothing has changed, and the caller
  // keeps `span`.
  void commit_span(VaReservation&& span);
  void commit_block(const Placement& plan, std::map<uint64_t, Mapping>& mapped);

  // --- free
  const Block* find(uint64_t address) const;  // the block that starts at `address`, or null
  std::optional<Range> block_around(uint64_t address) const;
  void free_later(uint64_t block) noexcept;  // allocates nothing: a free cannot fail
  const std::vector<uint64_t>& pending_frees() const { return pending_frees_; }
  // Returns the extents that become unused when `blocks` are freed.
  std::vector<uint64_t> plan_free(const std::vector<uint64_t>& blocks) const;
  // Removes `extents` and returns them; the caller destroys them.
  std::map<uint64_t, Mapping> take_extents(const std::vector<uint64_t>& extents) noexcept;
  // Completes the pending frees of `blocks`. If this function throws std::bad_alloc, the frees stay
  // pending.
  void commit_free(const std::vector<uint64_t>& blocks);

  bool needs(const Range& range) const;  // whether a block, freed or not, overlaps the range

  // --- pause and resume
  std::vector<Range> live() const;  // blocks that are not freed, in address order
  std::vector<Range> live_within(const Range& window) const;  // the parts of live() in `window`
  // Plans how a resume maps the live blocks: neighboring blocks share pieces of up to
  // `share_bytes`, larger blocks get their own pieces, and no piece exceeds kPieceBytes.
  std::vector<Range> plan_tiles(uint64_t share_bytes) const;
  // The next three functions allocate no memory and cannot fail, so a transition's commit cannot
  // fail.
  void take_extent(uint64_t address, std::map<uint64_t, Mapping>& taken) noexcept;
  void commit_extents(std::map<uint64_t, Mapping>& mapped) noexcept;  // moves all extents
  std::map<uint64_t, Mapping> take_all_extents() noexcept;
  const std::map<uint64_t, Mapping>& extents() const { return extents_; }

  const std::vector<VaReservation>& spans() const { return spans_; }
  uint64_t allocations() const { return blocks_.size(); }
  uint64_t allocated_bytes() const { return allocated_bytes_; }
  uint64_t small_bytes() const { return small_bytes_; }  // the bytes of blocks that are not large
  uint64_t resident_bytes() const;

 private:
  // The nodes of a free range in both maps. Keeping the nodes avoids allocations when the maps
  // change.
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
  // These functions return the first address in `free` at which `need` bytes are entirely covered
  // by extents, or entirely uncovered.
  std::optional<uint64_t> find_covered(const Range& free, uint64_t need) const;
  std::optional<uint64_t> find_uncovered(const Range& free, uint64_t need) const;
  std::vector<Range> uncovered(uint64_t begin, uint64_t end) const;

  Device* device_;
  std::vector<VaReservation> spans_;
  std::map<uint64_t, Block> blocks_;     // by address
  std::vector<uint64_t> pending_frees_;  // addresses; the capacity suffices for all blocks
  std::map<uint64_t, uint64_t> free_;    // address -> bytes, neighbors joined
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // the same ranges as (bytes, address)
  std::map<uint64_t, Mapping>
      extents_;  // by address; declared after spans_, so they are unmapped first
  uint64_t allocated_bytes_ = 0;
  uint64_t small_bytes_ = 0;
  uint64_t extent_bytes_ = 0;
};

}  // namespace memsaver
