#include "core/platform/range.h"

#include <algorithm>

namespace memsaver {
namespace {

void sort_by_address(std::vector<Range>& ranges) {
  const auto before = [](const Range& a, const Range& b) { return a.address < b.address; };
  if (std::is_sorted(ranges.begin(), ranges.end(), before)) return;  // the common case, and faster
  std::sort(ranges.begin(), ranges.end(), before);
}

}  // namespace

void append(std::vector<Range>& ranges, uint64_t begin, uint64_t end) {
  if (begin >= end) return;
  if (!ranges.empty() && ranges.back().end() == begin) {
    ranges.back().bytes += end - begin;
  } else {
    ranges.push_back({begin, end - begin});
  }
}

std::vector<Range> subtract(std::vector<Range> ranges, std::vector<Range> holes) {
  sort_by_address(ranges);
  sort_by_address(holes);
  std::vector<Range> left;
  size_t hole = 0;
  for (const Range& range : ranges) {
    uint64_t at = range.address;
    while (hole < holes.size() && holes[hole].end() <= at) ++hole;
    for (size_t i = hole; i < holes.size() && holes[i].address < range.end(); ++i) {
      append(left, at, std::min(holes[i].address, range.end()));
      at = std::max(at, holes[i].end());
    }
    append(left, at, range.end());
  }
  return left;
}

std::vector<Range> intersect(const std::vector<Range>& ranges, const std::vector<Range>& others) {
  return subtract(ranges, subtract(ranges, others));
}

std::vector<Range> within(const std::vector<Range>& ranges, const Range& window) {
  std::vector<Range> inside;
  append_within(ranges, window, inside);
  return inside;
}

void append_within(const std::vector<Range>& ranges, const Range& window,
                   std::vector<Range>& parts) {
  auto at =
      std::upper_bound(ranges.begin(), ranges.end(), window.address,
                       [](uint64_t address, const Range& range) { return address < range.end(); });
  for (; at != ranges.end() && at->address < window.end(); ++at) {
    append(parts, std::max(at->address, window.address), std::min(at->end(), window.end()));
  }
}

std::vector<Range> widened(const std::vector<Range>& ranges, uint64_t unit) {
  std::vector<Range> wide;
  for (const Range& range : ranges) {
    uint64_t begin = range.address / unit * unit;
    const uint64_t end = (range.end() + unit - 1) / unit * unit;
    if (!wide.empty()) begin = std::max(begin, wide.back().end());
    append(wide, begin, end);
  }
  return wide;
}

std::vector<Range> cut(const std::vector<Range>& ranges, uint64_t unit) {
  std::vector<Range> pieces;
  for (const Range& range : ranges) {
    for (uint64_t at = range.address; at < range.end();) {
      const uint64_t end = std::min(range.end(), (at / unit + 1) * unit);
      pieces.push_back({at, end - at});
      at = end;
    }
  }
  return pieces;
}

void cut_out(std::vector<Range>& ranges, const Range& hole) {
  auto first = std::partition_point(ranges.begin(), ranges.end(), [&hole](const Range& range) {
    return range.end() <= hole.address;
  });
  if (first == ranges.end() || hole.bytes == 0) return;
  if (first->address < hole.address) {
    const Range behind{hole.end(), first->end() - std::min(first->end(), hole.end())};
    if (behind.bytes > 0) first = std::prev(ranges.insert(std::next(first), behind));
    first->bytes = hole.address - first->address;
    ++first;
  }
  const auto last = std::partition_point(
      first, ranges.end(), [&hole](const Range& range) { return range.end() <= hole.end(); });
  if (last != ranges.end() && last->address < hole.end()) {
    last->bytes = last->end() - hole.end();
    last->address = hole.end();
  }
  ranges.erase(first, last);
}

uint64_t total(const std::vector<Range>& ranges) {
  uint64_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

}  // namespace memsaver
