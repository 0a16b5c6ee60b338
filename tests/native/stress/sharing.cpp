// The stress thread's exports of its blocks, which it imports itself, as another process would.
#include <unistd.h>

#include <vector>

#include "thread.h"

namespace stress {

// Imports a block's memory, and checks and overwrites the block through the import. Holds no lock
// until the memory is imported: the tag can be paused at any time before the import, but not after.
bool Thread::import_block() {
  settle();
  Block* const block = any_block();
  if (!block || import_.span) return release_import();
  ms_error error{};
  const auto address = reinterpret_cast<uint64_t>(block->pointer);
  const ms_range range{address, block->bytes};
  if (!importer_ &&
      !fine(ms_importer_open(getpid(), &importer_, &error), error, "ms_importer_open", {})) {
    return false;
  }
  ms_exported* rows = nullptr;
  size_t count = 0;
  if (!fine(ms_importer_export(importer_, &range, 1, SIZE_MAX, &rows, &count, &error), error,
            "ms_importer_export", {MS_SHARING_FAILED})) {
    return false;
  }
  if (!is_shareable(static_cast<size_t>(block->tag))) {
    world_.fail(tag_of(*block).name + " is exportable");
  }
  std::vector<ms_foreign_extent> extents;
  for (size_t i = 0; i < count; ++i) {
    extents.push_back({rows[i].address - rows[i].span_address, rows[i].bytes, rows[i].descriptor});
    import_.ids.push_back(rows[i].id);
    import_.offsets.push_back(extents.back().offset);
  }
  import_.tag = &tag_of(*block);
  uint64_t span = 0;
  const bool mapped =
      fine(ms_foreign_span_reserve(block->device, rows[0].span_bytes, &import_.span, &span, &error),
           error, "ms_foreign_span_reserve", {}) &&
      fine(ms_foreign_span_map(import_.span, extents.data(), count, &error), error,
           "ms_foreign_span_map", {});
  const uint64_t offset = address - rows[0].span_address;
  for (const ms_foreign_extent& extent : extents) ::close(extent.descriptor);
  ms_list_free(rows);
  if (!mapped) return false;
  auto* const there = reinterpret_cast<void*>(span + offset);
  const auto lock = hold_imported();
  if (!lock) return true;
  require_contents(*block, there);
  block->filling = Filling::kPattern;
  block->value = random_();
  block->losses = import_.tag->losses;
  write_pattern(there, block->bytes, block->value);
  require_contents(*block, block->pointer);
  return true;
}

// Checks that the imported tag is mapped, and keeps it so. Returns no lock if a thread that wants
// to pause the tag has it: that thread waits for this one.
std::shared_lock<std::shared_mutex> Thread::hold_imported() {
  std::shared_lock<std::shared_mutex> lock(import_.tag->contents, std::try_to_lock);
  if (lock && import_.tag->paused) {
    world_.fail(import_.tag->name + " was paused while its memory was imported");
  }
  return lock;
}

// Ends the thread's import, if it has one: like a process that continues, or like one that exits.
bool Thread::release_import() {
  if (!import_.span) return false;
  hold_imported();
  ms_error error{};
  if (one_in(2)) {
    fine(
        ms_foreign_span_unmap(import_.span, import_.offsets.data(), import_.offsets.size(), &error),
        error, "ms_foreign_span_unmap", {});
  }
  ms_foreign_span_free(import_.span);
  if (one_in(2)) {
    ms_importer_close(importer_);
    importer_ = nullptr;
  } else {
    fine(ms_importer_released(importer_, import_.ids.data(), import_.ids.size(), &error), error,
         "ms_importer_released", {});
  }
  import_ = {};
  return true;
}

}  // namespace stress
