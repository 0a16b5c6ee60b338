// range: pieces of an address range, and what can be done with lists of them.
#pragma once

#include <cstdint>
#include <vector>

namespace memsaver {

// Bytes [address, end()).
struct Range {
  uint64_t address = 0, bytes = 0;
  uint64_t end() const { return address + bytes; }
};

// Lists are sorted where it says so; what is returned is sorted, adjacent parts joined.

// `ranges` less `holes`, both sorted or not.
std::vector<Range> subtract(std::vector<Range> ranges, std::vector<Range> holes);
// The parts of `ranges` that lie in `others`, both sorted or not.
std::vector<Range> intersect(const std::vector<Range>& ranges, const std::vector<Range>& others);
// The parts of `ranges` (sorted, disjoint) inside `window`, in logarithmic time; not joined.
std::vector<Range> within(const std::vector<Range>& ranges, const Range& window);
// `ranges` (sorted, disjoint) with every begin and end moved outwards to a multiple of `unit`.
std::vector<Range> widened(const std::vector<Range>& ranges, uint64_t unit);
// `ranges` cut at the multiples of `unit`; not joined.
std::vector<Range> cut(const std::vector<Range>& ranges, uint64_t unit);

// Removes `hole` from `ranges` (sorted, disjoint). Takes logarithmic time, plus a move of the
// ranges behind the hole. Changes nothing if it throws std::bad_alloc.
void cut_out(std::vector<Range>& ranges, const Range& hole);

// Their bytes in sum.
uint64_t total(const std::vector<Range>& ranges);

// Appends to a sorted list, joined to its last where they touch. Nothing for an empty range.
void append(std::vector<Range>& ranges, uint64_t begin, uint64_t end);

}  // namespace memsaver
