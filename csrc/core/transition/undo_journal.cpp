#include "core/transition/undo_journal.h"

#include <utility>

#include "core/platform/log.h"
#include "core/platform/text.h"

namespace memsaver {

void UndoJournal::reserve(size_t pages, std::vector<CUmemAccessDesc> access) {
  moves_.reserve(pages);
  access_ = std::move(access);
}

void UndoJournal::unmap(Leaving& from, uint64_t address, Mapping& mapping) {
  const uint64_t bytes = mapping.bytes();
  moves_.push_back({Origin::kMapped, &from, address, bytes, nullptr, 0, mapping.unmap()});
}

void UndoJournal::transfer(const PageTransfer& transfer) {
  Mapping& source = transfer.from->mappings.at(transfer.page);
  Mapping& target = transfer.to->mappings[transfer.at];
  moves_.push_back({Origin::kMapped, transfer.from, transfer.page, transfer.bytes, transfer.to,
                    transfer.at, source.unmap()});
  append_within(transfer.from->ranges, {transfer.page, transfer.bytes}, transfer.from->transferred);
  target = Mapping::map(transfer.at, std::move(moves_.back().memory), access_);
}

void UndoJournal::map_new(Arriving& to, const Range& tile) {
  Mapping& target = to.mappings[tile.address];
  moves_.push_back({Origin::kNew, nullptr, 0, tile.bytes, &to, tile.address});
  const bool exportable = to.pool->tag.shareable.load();
  target = Mapping::map(tile.address, PhysicalMemory::create(to.device(), tile.bytes, exportable),
                        access_);
}

void UndoJournal::map_again(Arriving& to, UnmappedPage& page) {
  Mapping& target = to.mappings[page.address];
  moves_.push_back({Origin::kUnmapped, nullptr, 0, page.memory.bytes(), &to, page.address});
  target = Mapping::map(page.address, std::move(page.memory), access_);
}

void UndoJournal::release() noexcept {
  for (Move& move : moves_) {
    if (!move.to) move.memory = PhysicalMemory();
  }
}

// Returns whether the page is no longer mapped for its new owner.
bool UndoJournal::unmap_arrived(Move& move) noexcept {
  const auto target = move.to->mappings.find(move.at);
  if (move.origin != Origin::kNew && target->second.bytes() != 0) {
    try {
      move.memory = target->second.unmap();
    } catch (...) {
      if (move.origin == Origin::kMapped) {
        move.to->mappings.erase(target);  // its destructor retries, and adds a warning
      } else {
        warn_of([&] { return "pages of tag " + quoted(move.to->pool->tag.name) + " stay mapped"; });
      }
      return false;
    }
  }
  move.to->mappings.erase(target);
  return true;
}

bool UndoJournal::map_back(Move& move) noexcept try {
  move.from->mappings.at(move.page) = Mapping::map(move.page, std::move(move.memory), access_);
  return true;
} catch (...) {
  return false;
}

bool UndoJournal::undo() noexcept {
  bool all = true;
  for (auto move = moves_.rbegin(); move != moves_.rend(); ++move) {
    const bool unmapped = !move->to || unmap_arrived(*move);
    if (move->origin == Origin::kMapped) all &= unmapped && map_back(*move);
  }
  return all;
}

void UndoJournal::give_up_transferred() noexcept {
  for (Move& move : moves_) {
    if (move.origin != Origin::kMapped || !move.to) continue;
    move.from->mappings.erase(move.page);
    move.memory = PhysicalMemory();
  }
}

void UndoJournal::close() noexcept {
  for (Move& move : moves_) {
    if (move.memory.bytes() == 0) continue;
    if (move.from) {
      move.from->unmapped_pages.push_back({move.page, std::move(move.memory)});
    } else {
      move.to->unmapped_pages.push_back({move.at, std::move(move.memory)});
    }
  }
  moves_.clear();
}

}  // namespace memsaver
