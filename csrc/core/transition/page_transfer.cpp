#include "core/transition/page_transfer.h"

#include <algorithm>
#include <map>
#include <set>

namespace memsaver {
namespace {

// Adjacent addresses that need memory. `limit` is the start of the next page, or the end of the
// span.
struct Run {
  Arriving* arriving;
  Range range;
  uint64_t limit;
};

std::vector<Run> runs_of(const std::vector<Arriving*>& into) {
  std::vector<Run> runs;
  for (Arriving* to : into) {
    const Heap& heap = to->pool->heap;
    const auto span_end = [&](uint64_t address) {
      for (const VaReservation& span : heap.spans()) {
        if (address - span.address() < span.bytes()) return span.address() + span.bytes();
      }
      return address;
    };
    std::vector<uint64_t> starts;  // the addresses of all pages that are or will be mapped
    for (const UnmappedPage& page : to->pool->unmapped_pages) starts.push_back(page.address);
    for (const auto& [address, extent] : heap.extents()) starts.push_back(address);
    const size_t first = runs.size();
    for (const Range& tile : to->tiles) {
      starts.push_back(tile.address);
      const uint64_t end = span_end(tile.address);
      if (runs.size() > first && runs.back().range.end() == tile.address &&
          runs.back().limit == end) {
        runs.back().range.bytes += tile.bytes;
      } else {
        runs.push_back({to, tile, end});
      }
    }
    std::sort(starts.begin(), starts.end());
    for (size_t i = first; i < runs.size(); ++i) {
      const auto next = std::lower_bound(starts.begin(), starts.end(), runs[i].range.end());
      if (next != starts.end()) runs[i].limit = std::min(runs[i].limit, *next);
    }
  }
  return runs;
}

}  // namespace

PageTransferPlan plan_page_transfers(const std::vector<Leaving*>& out,
                                     const std::vector<Arriving*>& into, bool allow_larger) {
  PageTransferPlan plan;
  if (into.empty()) return plan;
  // Pages by size. Pages of the same size are used in the order of `out` and of their addresses, so
  // that the copies in both directions keep their order.
  struct Source {
    Leaving* leaving;
    uint64_t address;
  };
  std::vector<Source> sources;
  // A page of a shareable tag stays exportable, and other processes must not import another tag's
  // page. Shareable tags therefore receive only exportable pages, and other tags receive none of
  // them.
  std::map<uint64_t, std::set<size_t>> by_bytes_of[2];
  for (Leaving* from : out) {
    for (const auto& [address, extent] : from->pool->heap.extents()) {
      by_bytes_of[extent.memory().export_id() != 0][extent.bytes()].insert(sources.size());
      sources.push_back({from, address});
    }
  }
  if (sources.empty()) {
    for (const Arriving* to : into) plan.memory[to] = to->tiles;
    return plan;
  }
  std::map<size_t, PageTransfer> by_source;
  for (Run& run : runs_of(into)) {
    auto& by_bytes = by_bytes_of[run.arriving->pool->tag.shareable.load()];
    while (run.range.bytes > 0) {
      auto fitting = by_bytes.upper_bound(run.range.bytes);
      if (fitting != by_bytes.begin()) {
        --fitting;
      } else if (!allow_larger || fitting == by_bytes.end() ||
                 fitting->first > run.limit - run.range.address) {
        for (const Range& piece : cut({run.range}, kPieceBytes)) {
          plan.memory[run.arriving].push_back(piece);
        }
        break;
      }
      const uint64_t bytes = fitting->first;
      const size_t source = *fitting->second.begin();
      fitting->second.erase(fitting->second.begin());
      if (fitting->second.empty()) by_bytes.erase(fitting);
      by_source[source] = {sources[source].leaving, sources[source].address, bytes, run.arriving,
                           run.range.address};
      const uint64_t used = std::min(bytes, run.range.bytes);
      run.range = {run.range.address + used, run.range.bytes - used};
    }
  }
  for (const auto& [source, transfer] : by_source) plan.transfers.push_back(transfer);
  return plan;
}

}  // namespace memsaver
