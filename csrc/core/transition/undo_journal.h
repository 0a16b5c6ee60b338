// undo_journal: the pages that a transition moves on one device, with their previous places, so
// that all of them can be moved back.
//
// A page is a piece of physical memory with its contents. The journal makes every move, and records
// it in room that was reserved before the first one: undoing needs no host memory. It makes only
// calls that need no context. One thread at a time may use a journal. The caller drains the device
// before pages are unmapped.
#pragma once

#include <cuda.h>

#include <vector>

#include "core/transition/page_transfer.h"
#include "core/transition/transition_plan.h"

namespace memsaver {

class UndoJournal {
 public:
  // Reserves room for `pages` moves. Pages are mapped for `access` (Device::access).
  void reserve(size_t pages, std::vector<CUmemAccessDesc> access);

  // --- The moves. If one of these functions throws, undo() restores its page too. All throw
  // kDriverFailed.

  // Unmaps a page, which is later released or mapped again.
  void unmap(Leaving& from, uint64_t address, Mapping& mapping);
  // Also adds the page's saved ranges to Leaving::transferred.
  void transfer(const PageTransfer& transfer);
  // Throws kOutOfDeviceMemory.
  void map_new(Arriving& to, const Range& tile);
  void map_again(Arriving& to, UnmappedPage& page);

  // --- After success: releases the pages that were unmapped and not transferred.
  void release() noexcept;

  // --- After a failure

  // Moves all pages back. Returns false if the driver refused to map a page at its previous
  // address, or to unmap a transferred page. A page of an Arriving that the driver does not unmap
  // stays mapped.
  bool undo() noexcept;
  // After undo() returned false on any device: the pools of `out` keep their contents but stay
  // unmapped. Releases the pages that were transferred, which other contents may have overwritten.
  void give_up_transferred() noexcept;
  // Ends the journal. Pages that are still unmapped are retained in Pool::unmapped_pages.
  void close() noexcept;

 private:
  enum class Origin { kMapped, kUnmapped, kNew };
  struct Move {
    Origin origin;
    Leaving* from;  // the pool where the page was mapped, at `page`; null unless kMapped
    uint64_t page;
    uint64_t bytes;
    Arriving* to;  // the pool for which it is mapped, at `at`; null if it will be released
    uint64_t at;
    PhysicalMemory memory = {};  // the page, while it has no mapping
  };

  bool unmap_arrived(Move& move) noexcept;
  bool map_back(Move& move) noexcept;

  std::vector<Move> moves_;
  std::vector<CUmemAccessDesc> access_;
};

}  // namespace memsaver
