#include "core/handover.h"

#include <algorithm>
#include <map>
#include <set>

namespace memsaver {
namespace {

// A stretch of addresses that needs memory, and where the next page or the end of the span lies.
struct Run {
  Step* step;
  Range range;
  uint64_t limit;
};

std::vector<Run> runs_of(const std::vector<Step*>& into) {
  std::vector<Run> runs;
  for (Step* step : into) {
    const auto& spans = step->pool->heap.spans();
    const auto span_end = [&](uint64_t address) {
      for (const VaReservation& span : spans) {
        if (address - span.address() < span.bytes()) return span.address() + span.bytes();
      }
      return address;
    };
    std::vector<uint64_t> taken;  // starts of what else will be or is mapped
    for (const Page& page : step->pages) taken.push_back(page.first);
    for (const auto& [address, extent] : step->pool->heap.extents()) taken.push_back(address);
    const size_t first = runs.size();
    for (const Range& tile : step->tiles) {
      taken.push_back(tile.address);
      const uint64_t end = span_end(tile.address);
      if (runs.size() > first && runs.back().range.end() == tile.address &&
          runs.back().limit == end) {
        runs.back().range.bytes += tile.bytes;
      } else {
        runs.push_back({step, tile, end});
      }
    }
    std::sort(taken.begin(), taken.end());
    for (size_t i = first; i < runs.size(); ++i) {
      const auto next = std::lower_bound(taken.begin(), taken.end(), runs[i].range.end());
      if (next != taken.end()) runs[i].limit = std::min(runs[i].limit, *next);
    }
  }
  return runs;
}

}  // namespace

Handover plan_handover(const std::vector<Step*>& out, const std::vector<Step*>& into, bool beyond) {
  // By size; of one size in the order of the steps and addresses, so that the copies of both
  // directions keep their order.
  struct Source {
    Step* step;
    uint64_t address;
  };
  std::vector<Source> sources;
  std::map<uint64_t, std::set<size_t>> by_bytes;
  for (Step* step : out) {
    for (const auto& [address, mapping] : step->mappings) {
      by_bytes[mapping.bytes()].insert(sources.size());
      sources.push_back({step, address});
    }
  }
  Handover plan;
  std::vector<size_t> order;
  for (Run& run : runs_of(into)) {
    while (run.range.bytes > 0) {
      auto fitting = by_bytes.upper_bound(run.range.bytes);
      if (fitting != by_bytes.begin()) {
        --fitting;
      } else if (!beyond || fitting == by_bytes.end() ||
                 fitting->first > run.limit - run.range.address) {
        for (const Range& piece : cut({run.range}, kPieceBytes)) {
          plan.missing.emplace_back(run.step, piece);
        }
        break;
      }
      const uint64_t bytes = fitting->first;
      const size_t source = *fitting->second.begin();
      fitting->second.erase(fitting->second.begin());
      if (fitting->second.empty()) by_bytes.erase(fitting);
      plan.hands.push_back(
          {sources[source].step, sources[source].address, bytes, run.step, run.range.address});
      order.push_back(source);
      const uint64_t used = std::min(bytes, run.range.bytes);
      run.range = {run.range.address + used, run.range.bytes - used};
    }
  }
  std::vector<size_t> sorted(order.size());
  for (size_t i = 0; i < sorted.size(); ++i) sorted[i] = i;
  std::sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return order[a] < order[b]; });
  std::vector<Hand> hands;
  for (const size_t i : sorted) hands.push_back(std::move(plan.hands[i]));
  plan.hands = std::move(hands);
  return plan;
}

}  // namespace memsaver
