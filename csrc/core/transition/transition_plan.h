// transition_plan: the pools that a transition changes: those whose memory leaves the device, and
// those whose memory arrives.
//
// In a pause no tag arrives, and in a resume none leaves. Planning reads tags and heaps under the
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

// Tags by name, or every tag.
struct TagSelection {
  std::vector<std::string> names;
  bool is_every_tag = false;

  bool is_empty() const { return names.empty() && !is_every_tag; }
};

struct TransitionRequest {
  TagSelection out, into;  // to pause, and to resume
  // Overrides the policies of the tags of `out`. kNone in a resume restores nothing.
  std::optional<Backup> policy;
  // Ranges of `out` that no tensor owns: they are neither saved nor restored if Registry::changes
  // still equals `changes`.
  std::vector<Range> unowned;
  std::optional<uint64_t> changes;
};

// The transition's result for one tag on one device.
struct Change {
  const Tag* tag;
  int device;
  bool changed;           // false: the tag was already in the requested state
  uint64_t device_bytes;  // device memory released or mapped
  uint64_t copied_bytes;
};

// The memory of one tag on one device, in a transition.
struct PoolChange {
  explicit PoolChange(Pool& pool) : pool(&pool) {}

  Device& device() const { return pool->heap.device(); }

  Pool* pool;
  std::vector<Range> ranges;  // the ranges to save or to restore, sorted
  // Removed from the heap, or created for it. The entry of a mapping that was unmapped stays as an
  // empty entry.
  std::map<uint64_t, Mapping> mappings;
  // The pool's retained unmapped pages. A pause that cannot be undone leaves pages here; the resume
  // maps them, and keeps the entries in case it must be undone.
  std::vector<UnmappedPage> unmapped_pages;
  uint64_t device_bytes = 0;  // bytes to release or to map
  uint64_t copied_bytes = 0;
};

struct Leaving : PoolChange {
  using PoolChange::PoolChange;

  Backup policy = Backup::kNone;
  Unchanged unchanged;
  // The saved ranges of pages that were transferred to another tag. Their room is reserved before
  // the first transfer.
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

// The tags of a request. "Every tag" means those that exist when the request is made: a tag that is
// created while the transition waits for its tags is not included.
struct SelectedTags {
  std::vector<Tag*> all() const;  // `out`, then `into`

  std::vector<Tag*> out, into;
};

// Throws kUnknownTag, kInvalidArgument (a tag in both, or no tag requested).
SelectedTags select_tags(const TransitionRequest& request);

// The caller owns the tags. Throws kInvalidState if a region of a tag of `out` is open.
TransitionPlan plan_transition(const TransitionRequest& request, const SelectedTags& tags);

std::vector<std::string> names_of(const std::vector<Tag*>& tags);

}  // namespace memsaver
