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

// Arguments need not be sorted, unless stated otherwise. Results are sorted, and adjacent ranges
// are joined, unless stated otherwise.

// Returns `ranges` without `holes`.
std::vector<Range> subtract(std::vector<Range> ranges, std::vector<Range> holes);
// Returns the parts of `ranges` that are inside `others`.
std::vector<Range> intersect(const std::vector<Range>& ranges, const std::vector<Range>& others);
// Returns the parts of `ranges` (sorted, disjoint) inside `window`, in logarithmic time.
std::vector<Range> within(const std::vector<Range>& ranges, const Range& window);
// Appends the parts of `ranges` inside `window` to `parts`, a sorted list of ranges below `window`.
void append_within(const std::vector<Range>& ranges, const Range& window,
                   std::vector<Range>& parts);
// Returns `ranges` (sorted, disjoint) with every start and end moved outward to a multiple of
// `unit`.
std::vector<Range> widened(const std::vector<Range>& ranges, uint64_t unit);
// Returns `ranges` split at the multiples of `unit`; adjacent parts are not merged.
std::vector<Range> cut(const std::vector<Range>& ranges, uint64_t unit);

// Removes `hole` from `ranges` (sorted, disjoint). Takes logarithmic time, plus the time to move
// the ranges after the hole. If the function throws std::bad_alloc, nothing has changed.
void cut_out(std::vector<Range>& ranges, const Range& hole);

// Returns the total number of bytes in `ranges`.
uint64_t total(const std::vector<Range>& ranges);

// Appends the range [begin, end) to a sorted list. Joins the range to the last range of the list if
// the two are adjacent. Ignores an empty range.
void append(std::vector<Range>& ranges, uint64_t begin, uint64_t end);

}  // namespace memsaver
