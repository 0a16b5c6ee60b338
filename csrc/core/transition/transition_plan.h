// transition_plan: the pools that a transition changes: pools whose memory leaves the device, and
// pools whose memory arrives.
//
// In a pause no tag arrives, and in a resume no tag leaves. Planning reads tags and heaps under the
// registry's lock, changes nothing, and makes no driver call.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/driver/handles.h"
#include "core/memory/allocation.h"
#include "core/memory/registry.h"
#include "core/memory/timeline.h"

namespace memsaver {

// A selection of tags: either the named tags or every tag.
struct TagSelection {
  std::vector<std::string> names;
  bool is_every_tag = false;

  bool is_empty() const { return names.empty() && !is_every_tag; }
};

struct TransitionRequest {
  TagSelection out, into;  // to pause, and to resume
  // Overrides the policies of the tags in `out`. In a resume, kNone means that nothing is restored.
  std::optional<Backup> policy;
  // Ranges of tags in `out` that no tensor owns. These ranges are neither saved nor restored if
  // Registry::changes still equals `changes`.
  std::vector<Range> unowned;
  std::optional<uint64_t> changes;
};

// The result of a transition for one tag on one device.
struct Change {
  const Tag* tag;
  int device;
  bool changed;           // false: the tag was already in the requested state
  uint64_t device_bytes;  // device memory released or mapped
  uint64_t copied_bytes;
};

// The memory of one tag on one device that a transition changes.
struct PoolChange {
  explicit PoolChange(Pool& pool) : pool(&pool) {}

  Device& device() const { return pool->heap.device(); }

  Pool* pool;
  std::vector<Range> ranges;  // the ranges to save or to restore, sorted
  // Mappings that were removed from the heap or created for it. After a mapping is unmapped, its
  // entry stays in the map as an empty entry.
  std::map<uint64_t, Mapping> mappings;
  // The pool's retained unmapped pages. A pause that cannot be undone stores pages in this list.
  // The resume maps these pages, and keeps the entries because the resume may have to be undone.
  std::vector<UnmappedPage> unmapped_pages;
  uint64_t device_bytes = 0;  // bytes to release or to map
  uint64_t copied_bytes = 0;
};

struct Leaving : PoolChange {
  using PoolChange::PoolChange;

  Backup policy = Backup::kNone;
  Unchanged unchanged;
  // The saved ranges of pages that were transferred to another tag. The list's capacity is reserved
  // before the first transfer.
  std::vector<Range> transferred;
};

struct Arriving : PoolChange {
  using PoolChange::PoolChange;

  std::vector<Range> tiles;  // the pieces of memory to map
  bool poison = false;       // bytes that are not restored are filled with kPoison
};

struct TransitionPlan {
  Act act = Act::kNone;
  std::vector<Tag*> out_tags, into_tags;  // only tags that change
  std::vector<Leaving> out;
  std::vector<Arriving> into;
  std::vector<Change> rows;  // for each tag and device of the request, in its order
};

// The tags of a request. "Every tag" means every tag that exists when the request is made; a tag
// that is created while the transition waits for its tags is not included.
struct SelectedTags {
  std::vector<Tag*> all() const;  // `out`, then `into`

  std::vector<Tag*> out, into;
};

// Returns the tags of a request. Throws kUnknownTag, and kInvalidArgument if a tag is in both lists
// or no tag is requested.
SelectedTags select_tags(const TransitionRequest& request);

// Returns the plan for a request. The caller must own the tags. Throws kInvalidState if a region of
// a tag in `out` is open.
TransitionPlan plan_transition(const TransitionRequest& request, const SelectedTags& tags);

std::vector<std::string> names_of(const std::vector<Tag*>& tags);

}  // namespace memsaver
