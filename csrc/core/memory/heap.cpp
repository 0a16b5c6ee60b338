#include "core/memory/heap.h"

#include <algorithm>
#include <iterator>

namespace memsaver {
namespace {

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }

}  // namespace

uint64_t Heap::resident_bytes() const { return extent_bytes_; }

std::vector<Range> Heap::uncovered(uint64_t begin, uint64_t end) const {
  std::vector<Range> gaps;
  auto extent = extents_.upper_bound(begin);
  if (extent != extents_.begin()) --extent;
  for (; extent != extents_.end() && extent->first < end; ++extent) {
    if (extent->second.end() <= begin) continue;
    append(gaps, begin, std::min(extent->first, end));
    begin = extent->second.end();
  }
  append(gaps, begin, end);
  return gaps;
}

std::optional<uint64_t> Heap::find_covered(const Range& free, uint64_t need) const {
  uint64_t at = round_up(free.address, device_->granularity());
  while (at + need <= free.end()) {
    const std::vector<Range> gaps = uncovered(at, at + need);
    if (gaps.empty()) return at;
    const auto extent = extents_.lower_bound(gaps.back().address);  // the first after the last gap
    if (extent == extents_.end()) break;
    at = extent->first;
  }
  return std::nullopt;
}

std::optional<uint64_t> Heap::find_uncovered(const Range& free, uint64_t need) const {
  uint64_t at = round_up(free.address, device_->granularity());
  while (at + need <= free.end()) {
    const std::vector<Range> gaps = uncovered(at, at + need);
    if (gaps.size() == 1 && gaps[0].bytes == need) return at;
    at = std::prev(extents_.lower_bound(at + need))->second.end();  // behind the last extent
  }
  return std::nullopt;
}

Heap::Placement Heap::plan_block(uint64_t bytes, uint64_t large_bytes, uint64_t slab_bytes) const {
  const uint64_t unit = device_->granularity();
  uint64_t need = round_up(std::max<uint64_t>(bytes, 1), kBlockBytes);
  if (need >= unit) need = round_up(need, unit);
  const uint64_t align = need >= unit ? unit : kBlockBytes;

  Placement plan;
  plan.is_large = need >= std::max(unit, large_bytes);
  Range place;  // the free range of the block
  const auto search = [&](const auto& find) {
    for (auto it = by_size_.lower_bound({need, 0}); it != by_size_.end(); ++it) {
      place = {it->second, it->first};
      if (const std::optional<uint64_t> start = find(place)) {
        plan.block = {*start, need};
        return;
      }
    }
  };
  if (!plan.is_large) {
    search([&](const Range& free) {
      const uint64_t start = round_up(free.address, align);
      return start + need <= free.end() ? std::optional(start) : std::nullopt;
    });
  } else {
    // Without this bound, the search would visit every free range, of which there may be thousands.
    if (extent_bytes_ >= allocated_bytes_ + need) {
      search([&](const Range& free) { return find_covered(free, need); });
    }
    if (plan.block.bytes == 0) {
      search([&](const Range& free) { return find_uncovered(free, need); });
    }
  }
  if (plan.block.bytes == 0) return plan;

  plan.least = uncovered(round_down(plan.block.address, unit), round_up(plan.block.end(), unit));
  plan.missing = plan.least;
  if (!plan.is_large && !plan.missing.empty()) {
    Range& last = plan.missing.back();
    const auto next = extents_.lower_bound(last.end());
    uint64_t limit = round_down(place.end(), unit);
    if (next != extents_.end()) limit = std::min(limit, next->first);
    const uint64_t wanted = std::max(last.bytes, round_down(slab_bytes, unit));
    if (limit > last.end()) last.bytes = std::min(wanted, limit - last.address);
  }
  // No piece may be larger than kPieceBytes.
  for (std::vector<Range>* ranges : {&plan.missing, &plan.least}) {
    std::vector<Range> pieces;
    for (const Range& range : *ranges) {
      for (uint64_t at = range.address; at < range.end(); at += kPieceBytes) {
        pieces.push_back({at, std::min(kPieceBytes, range.end() - at)});
      }
    }
    *ranges = std::move(pieces);
  }
  return plan;
}

void Heap::commit_span(VaReservation&& span) {
  spans_.reserve(spans_.size() + 1);
  FreePlaces places = make_places();
  const Range range{span.address(), span.bytes()};
  spans_.push_back(std::move(span));
  add_free(std::move(places), range);
}

void Heap::commit_block(const Placement& plan, std::map<uint64_t, Mapping>& mapped) {
  const Range& block = plan.block;
  FreePlaces spare = make_places();
  if (pending_frees_.capacity() <= blocks_.size()) pending_frees_.reserve(2 * blocks_.size() + 1);
  blocks_.emplace(block.address, Block{block.bytes, plan.is_large, false});
  remove_free(std::move(spare), block);
  commit_extents(mapped);
  allocated_bytes_ += block.bytes;
  if (!plan.is_large) small_bytes_ += block.bytes;
}

const Heap::Block* Heap::find(uint64_t address) const {
  const auto found = blocks_.find(address);
  return found == blocks_.end() ? nullptr : &found->second;
}

std::optional<Range> Heap::block_around(uint64_t address) const {
  auto found = blocks_.upper_bound(address);
  if (found == blocks_.begin()) return std::nullopt;
  --found;
  const Range range{found->first, found->second.bytes};
  if (address >= range.end() || found->second.is_freed) return std::nullopt;
  return range;
}

void Heap::free_later(uint64_t block) noexcept {
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return;
  pending_frees_.push_back(block);
  found->second.is_freed = true;
}

bool Heap::needs(const Range& range) const {
  auto block = blocks_.upper_bound(range.address);
  if (block != blocks_.begin()) --block;
  for (; block != blocks_.end() && block->first < range.end(); ++block) {
    if (block->first + block->second.bytes > range.address) return true;
  }
  return false;
}

std::vector<uint64_t> Heap::plan_free(const std::vector<uint64_t>& blocks) const {
  const std::set<uint64_t> going(blocks.begin(), blocks.end());
  std::set<uint64_t> touched;
  for (const uint64_t address : blocks) {
    const uint64_t end = address + blocks_.at(address).bytes;
    auto extent = extents_.upper_bound(address);
    if (extent != extents_.begin()) --extent;
    for (; extent != extents_.end() && extent->first < end; ++extent) {
      if (extent->second.end() > address) touched.insert(extent->first);
    }
  }
  std::vector<uint64_t> unneeded;
  for (const uint64_t address : touched) {
    const uint64_t end = extents_.at(address).end();
    auto block = blocks_.upper_bound(address);
    if (block != blocks_.begin()) --block;
    bool needed = false;
    for (; block != blocks_.end() && block->first < end && !needed; ++block) {
      needed = block->first + block->second.bytes > address && !going.count(block->first);
    }
    if (!needed) unneeded.push_back(address);
  }
  return unneeded;
}

void Heap::commit_extents(std::map<uint64_t, Mapping>& mapped) noexcept {
  for (const auto& [address, mapping] : mapped) extent_bytes_ += mapping.bytes();
  extents_.merge(mapped);
}

std::map<uint64_t, Mapping> Heap::take_all_extents() noexcept {
  std::map<uint64_t, Mapping> taken;
  taken.swap(extents_);
  extent_bytes_ = 0;
  return taken;
}

std::map<uint64_t, Mapping> Heap::take_extents(const std::vector<uint64_t>& extents) noexcept {
  std::map<uint64_t, Mapping> taken;
  for (const uint64_t address : extents) take_extent(address, taken);
  return taken;
}

void Heap::take_extent(uint64_t address, std::map<uint64_t, Mapping>& taken) noexcept {
  auto node = extents_.extract(address);
  extent_bytes_ -= node.mapped().bytes();
  taken.insert(std::move(node));
}

void Heap::commit_free(const std::vector<uint64_t>& blocks) {
  const std::set<uint64_t> gone(blocks.begin(), blocks.end());
  std::vector<FreePlaces> places(gone.size());
  for (FreePlaces& made : places) made = make_places();
  pending_frees_.erase(std::remove_if(pending_frees_.begin(), pending_frees_.end(),
                                      [&](uint64_t address) { return gone.count(address) > 0; }),
                       pending_frees_.end());
  for (const uint64_t address : gone) {
    const auto block = blocks_.find(address);
    const Range range{address, block->second.bytes};
    allocated_bytes_ -= range.bytes;
    if (!block->second.is_large) small_bytes_ -= range.bytes;
    blocks_.erase(block);
    add_free(std::move(places.back()), range);
    places.pop_back();
  }
}

std::vector<Range> Heap::live() const {
  std::vector<Range> ranges;
  ranges.reserve(blocks_.size());
  for (const auto& [address, block] : blocks_) {
    if (!block.is_freed) ranges.push_back({address, block.bytes});
  }
  return ranges;
}

std::vector<Range> Heap::live_within(const Range& window) const {
  std::vector<Range> parts;
  auto block = blocks_.upper_bound(window.address);
  if (block != blocks_.begin()) --block;
  for (; block != blocks_.end() && block->first < window.end(); ++block) {
    if (block->second.is_freed) continue;
    append(parts, std::max(block->first, window.address),
           std::min(block->first + block->second.bytes, window.end()));
  }
  return parts;
}

std::vector<Range> Heap::plan_tiles(uint64_t share_bytes) const {
  const uint64_t unit = device_->granularity();
  std::vector<Range> tiles;
  Range tile;
  const auto close = [&] {
    for (uint64_t at = tile.address; at < tile.end(); at += kPieceBytes) {
      tiles.push_back({at, std::min(kPieceBytes, tile.end() - at)});
    }
  };
  uint64_t covered_end = 0;
  for (const Range& block : live()) {
    const uint64_t begin = std::max(round_down(block.address, unit), covered_end);
    const uint64_t end = round_up(block.end(), unit);
    if (begin >= end) continue;
    covered_end = end;
    if (tile.bytes != 0 && begin == tile.end() && end - tile.address <= share_bytes &&
        !starts_span(begin)) {
      tile.bytes = end - tile.address;
    } else {
      close();
      tile = {begin, end - begin};
    }
  }
  close();
  return tiles;
}

bool Heap::starts_span(uint64_t address) const {
  return std::any_of(spans_.begin(), spans_.end(),
                     [address](const VaReservation& span) { return span.address() == address; });
}

Heap::FreePlaces Heap::make_places() {
  std::map<uint64_t, uint64_t> by_address{{0, 0}};
  std::set<std::pair<uint64_t, uint64_t>> by_size{{0, 0}};
  return {by_address.extract(by_address.begin()), by_size.extract(by_size.begin())};
}

Heap::FreePlaces Heap::take_free(std::map<uint64_t, uint64_t>::iterator at) noexcept {
  const auto sized = by_size_.find({at->second, at->first});
  return {free_.extract(at), by_size_.extract(sized)};
}

void Heap::put_free(FreePlaces places, const Range& range) noexcept {
  places.by_address.key() = range.address;
  places.by_address.mapped() = range.bytes;
  places.by_size.value() = {range.bytes, range.address};
  free_.insert(std::move(places.by_address));
  by_size_.insert(std::move(places.by_size));
}

void Heap::add_free(FreePlaces places, Range range) noexcept {
  auto next = free_.lower_bound(range.address);
  // Adjacent spans stay separate: a mapping must lie in one reservation.
  if (next != free_.end() && range.end() == next->first && !starts_span(next->first)) {
    range.bytes += next->second;
    const auto joined = next++;
    take_free(joined);
  }
  if (next != free_.begin() && !starts_span(range.address)) {
    const auto before = std::prev(next);
    if (before->first + before->second == range.address) {
      range = {before->first, before->second + range.bytes};
      take_free(before);
    }
  }
  put_free(std::move(places), range);
}

void Heap::remove_free(FreePlaces spare, const Range& range) noexcept {
  const auto around = std::prev(free_.upper_bound(range.address));
  const Range whole{around->first, around->second};
  FreePlaces places = take_free(around);
  if (whole.address < range.address) {
    put_free(std::move(places), {whole.address, range.address - whole.address});
    places = std::move(spare);
  }
  if (range.end() < whole.end()) {
    put_free(std::move(places), {range.end(), whole.end() - range.end()});
  }
}

}  // namespace memsaver
