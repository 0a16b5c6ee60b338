// range: address ranges, and operations on lists of them.
#pragma once

#include <cstdint>
#include <vector>

namespace memsaver {

// Bytes [address, end()).
struct Range {
  uint64_t address = 0, bytes = 0;
  uint64_t end() const { return address + bytes; }
};

// Arguments are sorted only if stated. Results are sorted, with adjacent ranges joined, unless
// stated otherwise.

// Returns `ranges` without `holes`.
std::vector<Range> subtract(std::vector<Range> ranges, std::vector<Range> holes);
// Returns the parts of `ranges` that lie in `others`.
std::vector<Range> intersect(const std::vector<Range>& ranges, const std::vector<Range>& others);
// Returns the parts of `ranges` (sorted, disjoint) inside `window`, in logarithmic time.
std::vector<Range> within(const std::vector<Range>& ranges, const Range& window);
// Appends these parts to `parts`, a sorted list of ranges below `window`.
void append_within(const std::vector<Range>& ranges, const Range& window,
                   std::vector<Range>& parts);
// Returns `ranges` (sorted, disjoint) with every start and end moved outwards to a multiple of
// `unit`.
std::vector<Range> widened(const std::vector<Range>& ranges, uint64_t unit);
// Returns `ranges` split at the multiples of `unit`; adjacent parts are not merged.
std::vector<Range> cut(const std::vector<Range>& ranges, uint64_t unit);

// Removes `hole` from `ranges` (sorted, disjoint). Takes logarithmic time, plus a move of the
// ranges behind the hole. Changes nothing if it throws std::bad_alloc.
void cut_out(std::vector<Range>& ranges, const Range& hole);

// Returns the total number of bytes.
uint64_t total(const std::vector<Range>& ranges);

// Appends a range to a sorted list, joined to the last one if they touch. Ignores an empty range.
void append(std::vector<Range>& ranges, uint64_t begin, uint64_t end);

}  // namespace memsaver
