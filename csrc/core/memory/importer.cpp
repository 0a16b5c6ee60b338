#include "core/memory/importer.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>

#include "core/memory/allocation.h"
#include "core/memory/reservation.h"
#include "core/platform/options.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

std::atomic<int> requests{-1};

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

// Calls `visit(address, mapping)` for each extent under the range. Needs the registry's lock.
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

Error shared_error(const std::vector<Tag*>& tags) {
  std::string text;
  std::string first;
  uint64_t total_bytes = 0;
  for (const Importer* importer : Registry::instance().importers) {
    for (const auto& [tag, bytes] : importer->bytes()) {
      if (std::find(tags.begin(), tags.end(), tag) == tags.end()) continue;
      if (first.empty()) first = tag->name;
      total_bytes += bytes;
      if (text.size() < 400) {
        text += (text.empty() ? "" : ", ") + std::string("process ") +
                std::to_string(importer->pid()) + " (" + format_bytes(bytes) + " of " +
                quoted(tag->name) + ")";
      }
    }
  }
  Error error(Status::kTagShared,
              "tag " + quoted(first) +
                  " cannot be paused while other processes use its tensors: " + text +
                  " did not release them within option importer_seconds; delete the tensors there "
                  "first, or raise the option");
  error.tag = first;
  error.needed_bytes = total_bytes;
  return error;
}

}  // namespace

std::vector<ExportedExtent> exportable_extents(const Range& range) {
  std::vector<ExportedExtent> rows;
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  const Pool& pool = pool_of(range);
  visit_extents(pool, range, [&](uint64_t address, const Mapping& extent) {
    rows.push_back(row_of(pool, address, extent));
  });
  return rows;
}

void make_shareable(Tag& tag) { tag.shareable.store(true); }

std::unique_ptr<Importer> Importer::open(int64_t pid) {
  std::unique_ptr<Importer> made(new Importer(pid));
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  Registry::instance().importers.push_back(made.get());
  return made;
}

Importer::~Importer() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<Importer*>& all = registry.importers;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
  registry.changed.notify_all();
}

std::vector<ExportedExtent> Importer::export_extents(const std::vector<Range>& ranges) {
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
        if (pieces_.count(id)) return;
        rows.push_back(row_of(pool, address, extent));
        extents.push_back(&extent);
        bytes_[&pool.tag] += 0;
        pieces_.emplace(id, Piece{&pool.tag, extent.bytes()});
        bytes_[&pool.tag] += extent.bytes();
      });
    }
    hold.unlock();
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].descriptor = extents[i]->memory().export_memory();
    }
  } catch (...) {
    hold.lock();
    for (const ExportedExtent& row : rows) forget(row.id);
    throw;
  }
  return rows;
}

void Importer::released(const uint64_t* ids, size_t count) noexcept {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (size_t i = 0; i < count; ++i) forget(ids[i]);
  registry.changed.notify_all();
}

// Needs the registry's lock.
void Importer::forget(uint64_t id) noexcept {
  const auto piece = pieces_.find(id);
  if (piece == pieces_.end()) return;
  const auto total = bytes_.find(piece->second.tag);
  total->second -= piece->second.bytes;
  if (total->second == 0) bytes_.erase(total);
  pieces_.erase(piece);
}

bool is_imported(const std::vector<Tag*>& tags) noexcept {
  for (const Importer* importer : Registry::instance().importers) {
    for (Tag* tag : tags) {
      if (importer->bytes().count(tag)) return true;
    }
  }
  return false;
}

void wait_for_importers(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& all,
                        const std::vector<Tag*>& out) {
  Deadline deadline;
  for (;;) {
    wait_for_tags(lock, all, Need::kTransition);
    if (!is_imported(out)) return;
    const auto now = std::chrono::steady_clock::now();
    if (!deadline) deadline = now + time_option(Option::importer_seconds);
    if (now >= *deadline) throw shared_error(out);
    request_release();
    wait_for_a_change(lock, out, *deadline);
  }
}

int release_requests() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (requests.load() < 0) {
    const int made = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made < 0) {
      Error error(Status::kOutOfHostMemory,
                  std::string("no eventfd could be created: ") + std::strerror(errno));
      error.os_error = errno;
      throw error;
    }
    requests.store(made);
  }
  return requests.load();
}

void request_release() noexcept {
  const int descriptor = requests.load();
  if (descriptor >= 0) eventfd_write(descriptor, 1);
}

}  // namespace memsaver
