#include "core/memory/exports.h"

#include <mutex>
#include <optional>
#include <string>

#include "core/memory/allocation.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

Pool& pool_of(const Range& range) {
  Pool* const pool = Registry::owner(range.address);
  if (!pool) throw Error(Status::kNotOurs, "the address was not allocated by memsaver");
  return *pool;
}

Error sharing_error(const Pool& pool, const std::string& reason) {
  return Error(Status::kSharingFailed, "memory of tag " + quoted(pool.tag.name) +
                                           " cannot be sent to another process: " + reason)
      .with_tag(pool.tag.name);
}

Range span_around(const Heap& heap, uint64_t address) {
  for (const VaReservation& span : heap.spans()) {
    if (address - span.address() < span.bytes()) return {span.address(), span.bytes()};
  }
  return {};
}

// Calls `visit(address, mapping)` for each extent under the range. Requires the registry's lock.
template <typename Visit>
void visit_extents(const Pool& pool, const Range& range, Visit visit) {
  const Heap& heap = pool.heap;
  if (pool.tag.state != State::kMapped) {
    throw sharing_error(pool, "the tag is paused; resume it first");
  }
  const std::optional<Range> block = heap.block_around(range.address);
  if (!block || range.bytes > block->end() - range.address) {
    throw sharing_error(pool, "it was freed");
  }
  auto extent = heap.extents().upper_bound(range.address);
  if (extent != heap.extents().begin()) --extent;
  for (; extent != heap.extents().end() && extent->first < range.end(); ++extent) {
    if (extent->second.end() <= range.address) continue;
    if (extent->second.memory().export_id() == 0) {
      throw sharing_error(pool,
                          "it was allocated before the tag became shareable; pause and resume the "
                          "tag once, or create its first tensors with "
                          "memsaver.region(tag, shareable=True)");
    }
    visit(extent->first, extent->second);
  }
}

ExportedExtent row_of(const Pool& pool, uint64_t address, const Mapping& extent) {
  return {{address, extent.bytes()},
          span_around(pool.heap, address),
          extent.memory().export_id(),
          pool.heap.device().ordinal(),
          {}};
}

}  // namespace

std::vector<ExportedExtent> exportable_extents(const Range& range) {
  std::vector<ExportedExtent> rows;
  std::unique_lock<std::mutex> lock(Registry::instance().mutex);
  wait_for_tags(lock, {&pool_of(range).tag}, Need::kSettled);
  const Pool& pool = pool_of(range);
  visit_extents(pool, range, [&](uint64_t address, const Mapping& extent) {
    rows.push_back(row_of(pool, address, extent));
  });
  return rows;
}

void make_shareable(Tag& tag) noexcept { tag.shareable.store(true); }

std::vector<ExportedExtent> export_extents(Importer& to, const std::vector<Range>& ranges,
                                           size_t most) {
  if (ranges.empty()) throw Error(Status::kInvalidArgument, "there is no range to export");
  Registry& registry = Registry::instance();
  Pool& pool = pool_of(ranges.front());
  for (const Range& range : ranges) {
    if (&pool_of(range) == &pool) continue;
    throw Error(Status::kInvalidArgument, "the ranges belong to several tags or devices");
  }
  Hold hold(std::unique_lock<std::mutex>(registry.mutex), {&pool.tag});
  std::vector<ExportedExtent> rows;
  std::vector<const Mapping*> extents;  // unchanged while this thread owns the Hold
  try {
    for (const Range& range : ranges) {
      visit_extents(pool, range, [&](uint64_t address, const Mapping& extent) {
        const uint64_t id = extent.memory().export_id();
        if (to.has(id) || rows.size() >= most) return;
        rows.push_back(row_of(pool, address, extent));
        extents.push_back(&extent);
        to.add(id, pool.tag, extent.bytes());
      });
    }
    hold.unlock();
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].descriptor = extents[i]->memory().export_memory();
    }
  } catch (...) {
    hold.lock();
    for (const ExportedExtent& row : rows) to.forget(row.id);
    throw;
  }
  return rows;
}

}  // namespace memsaver
