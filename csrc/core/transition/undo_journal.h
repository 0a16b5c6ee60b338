// undo_journal: records the pages that a transition moves on one device and their previous places,
// so that all pages can be moved back.
//
// A page is a piece of physical memory with its contents. The journal makes every move and records
// it. Room for all records is reserved before the first move, so undoing needs no host memory. The
// journal makes only driver calls that need no context. One thread at a time may use a journal. The
// caller must drain the device before pages are unmapped.
#pragma once

#include <cuda.h>

#include <vector>

#include "core/transition/page_transfer.h"
#include "core/transition/transition_plan.h"

namespace memsaver {

class UndoJournal {
 public:
  // Reserves room for the records of `pages` moves. Pages are mapped with the access rights
  // `access` (a result of Device::access).
  void reserve(size_t pages, std::vector<CUmemAccessDesc> access);

  // --- The moves. If one of these functions throws, undo() also restores the page of the failed
  // move. All of these functions throw kDriverFailed.

  // Unmaps a page, which is later released or mapped again.
  void unmap(Leaving& from, uint64_t address, Mapping& mapping);
  // Transfers a page to an arriving tag, and adds the page's saved ranges to Leaving::transferred.
  void transfer(const PageTransfer& transfer);
  // Throws kOutOfDeviceMemory.
  void map_new(Arriving& to, const Range& tile);
  void map_again(Arriving& to, UnmappedPage& page);

  // --- After success: releases the pages that were unmapped and not transferred.
  void release() noexcept;

  // --- After a failure

  // Moves all pages back. Returns false if the driver refused to map a page at its previous
  // address, or to unmap a transferred page. If the driver does not unmap a page of an Arriving,
  // the page stays mapped.
  bool undo() noexcept;
  // Called after undo() returned false on any device. The pools of `out` then keep their contents
  // but stay unmapped. Releases the pages that were transferred, because other contents may have
  // overwritten them.
  void give_up_transferred() noexcept;
  // Ends the journal, and retains pages that are still unmapped in Pool::unmapped_pages.
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
