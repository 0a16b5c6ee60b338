// handover: which pages of the tags that go out come to lie under the tags that come in, on one
// device. Geometry only: no driver call is made here.
#pragma once

#include <vector>

#include "core/handles.h"
#include "core/range.h"
#include "core/step.h"

namespace memsaver {

// A page that changes hands: from `page` of one step to `at` of another.
struct Hand {
  Step* from;
  uint64_t page, bytes;
  Step* to;
  uint64_t at;
  bool left = false;           // it was unmapped from `page`
  PhysicalMemory memory = {};  // while it is at neither
};

struct Handover {
  std::vector<Hand> hands;                       // in the order of `from` and its pages
  std::vector<std::pair<Step*, Range>> missing;  // to be mapped with new memory
};

// Fits the extents of `out` (taken out, in `mappings`) under the tiles of `into`. A page is never
// cut: where none is small enough, new memory is asked for; or, with `beyond`, a larger page
// reaches beyond what lives into addresses of the same span that nothing needs.
Handover plan_handover(const std::vector<Step*>& out, const std::vector<Step*>& into, bool beyond);

}  // namespace memsaver
