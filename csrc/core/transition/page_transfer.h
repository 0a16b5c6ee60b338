// page_transfer: plans which pages of the leaving tags are mapped for the arriving tags. Makes no
// driver call.
#pragma once

#include <map>
#include <vector>

#include "core/platform/range.h"
#include "core/transition/transition_plan.h"

namespace memsaver {

// A move of the page at address `page` of a leaving tag to the address `at` of an arriving tag.
struct PageTransfer {
  Leaving* from;
  uint64_t page, bytes;
  Arriving* to;
  uint64_t at;

  uint64_t end() const { return page + bytes; }
};

struct PageTransferPlan {
  std::vector<PageTransfer> transfers;  // in the order of `out` and of the addresses
  std::map<const Arriving*, std::vector<Range>> memory;  // the rest, to be mapped with new memory
};

// Assigns the extents of `out` to the tiles of `into`. A page is never split. If no page is small
// enough, the plan contains new memory or, with `allow_larger`, a larger page that extends beyond
// the tiles into unused addresses of the same span.
PageTransferPlan plan_page_transfers(const std::vector<Leaving*>& out,
                                     const std::vector<Arriving*>& into, bool allow_larger);

}  // namespace memsaver
