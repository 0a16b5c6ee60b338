#include "core/transition/transition_plan.h"

#include <algorithm>

#include "core/platform/options.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

// Memory without a backup (a KV cache) is mapped in pieces this many times as large, because it
// consists of a few large blocks.
constexpr uint64_t kDiscardedShares = 6;

std::vector<Tag*> select(const TagSelection& selection) {
  if (selection.is_empty()) return {};
  return Registry::instance().select(selection.names);
}

std::vector<Tag*> not_yet(State wanted, const std::vector<Tag*>& among) {
  std::vector<Tag*> tags;
  for (Tag* tag : among) {
    if (tag->state != wanted) tags.push_back(tag);
  }
  return tags;
}

// Returns `blocks` (sorted) without `holes`, block by block and not joined, as a backup expects.
std::vector<Range> less(const std::vector<Range>& blocks, const std::vector<Range>& holes) {
  const std::vector<Range> left = subtract(blocks, holes);
  std::vector<Range> parts;
  for (const Range& block : blocks) {
    for (const Range& part : within(left, block)) parts.push_back(part);
  }
  return parts;
}

void require_no_open_region(const Tag& tag) {
  if (tag.open_regions == 0) return;
  throw Error(Status::kInvalidState,
              "tag " + quoted(tag.name) + " cannot be paused while a region of it is open (" +
                  std::to_string(tag.open_regions) +
                  " now, on this thread or others): new tensors would get no memory; leave the "
                  "region first")
      .with_tag(tag.name);
}

Leaving plan_leaving(Pool& pool, const TransitionRequest& request) {
  // The unowned ranges may have been allocated for a tensor since the caller determined them.
  const bool is_current =
      !request.changes || *request.changes == Registry::instance().changes.load();
  Leaving leaving(pool);
  leaving.policy = request.policy.value_or(pool.tag.policy);
  if (leaving.policy != Backup::kNone) {
    leaving.ranges = is_current ? less(pool.heap.live(), request.unowned) : pool.heap.live();
  }
  leaving.device_bytes = pool.heap.resident_bytes();
  return leaving;
}

Arriving plan_arriving(Pool& pool, bool restores) {
  Arriving arriving(pool);
  const std::vector<Range> none;
  const std::vector<Range>& saved = restores ? pool.saved : none;
  // Retained unmapped pages, from a pause that failed and could not be undone.
  std::vector<Range> present;
  for (const UnmappedPage& page : pool.unmapped_pages) {
    present.push_back({page.address, page.memory.bytes()});
  }
  for (const auto& [address, extent] : pool.heap.extents()) {
    present.push_back({address, extent.bytes()});
  }
  const uint64_t shares = saved.empty() ? kDiscardedShares : 1;
  arriving.tiles = pool.heap.plan_tiles(option(Option::share_bytes) * shares);
  if (!present.empty()) {
    arriving.tiles = cut(subtract(std::move(arriving.tiles), std::move(present)), kPieceBytes);
  }
  if (!saved.empty()) arriving.ranges = intersect(saved, pool.heap.live());
  arriving.device_bytes = total(arriving.tiles);
  arriving.poison = flag(Option::poison);
  return arriving;
}

void add_rows(const std::vector<Tag*>& tags, State wanted, std::vector<Change>& rows) {
  for (const Tag* tag : tags) {
    const bool changed = tag->state != wanted;
    if (tag->pools.empty()) rows.push_back({tag, -1, changed, 0, 0});
    for (const auto& [ordinal, pool] : tag->pools) rows.push_back({tag, ordinal, changed, 0, 0});
  }
}

}  // namespace

std::vector<std::string> names_of(const std::vector<Tag*>& tags) {
  std::vector<std::string> names;
  for (const Tag* tag : tags) names.push_back(tag->name);
  return names;
}

std::vector<Tag*> SelectedTags::all() const {
  std::vector<Tag*> tags = out;
  tags.insert(tags.end(), into.begin(), into.end());
  return tags;
}

SelectedTags select_tags(const TransitionRequest& request) {
  if (request.out.is_empty() && request.into.is_empty()) {
    throw Error(Status::kInvalidArgument, "a transition needs a tag to pause or to resume");
  }
  SelectedTags tags{select(request.out), select(request.into)};
  for (Tag* tag : tags.into) {
    if (std::find(tags.out.begin(), tags.out.end(), tag) != tags.out.end()) {
      throw Error(Status::kInvalidArgument,
                  "tag " + quoted(tag->name) + " cannot be both paused and resumed by one swap")
          .with_tag(tag->name);
    }
  }
  return tags;
}

TransitionPlan plan_transition(const TransitionRequest& request, const SelectedTags& tags) {
  TransitionPlan plan;
  plan.act = request.into.is_empty()  ? Act::kPause
             : request.out.is_empty() ? Act::kResume
                                      : Act::kSwap;
  plan.out_tags = not_yet(State::kPaused, tags.out);
  plan.into_tags = not_yet(State::kMapped, tags.into);
  for (Tag* tag : plan.out_tags) {
    require_no_open_region(*tag);
    for (auto& [ordinal, pool] : tag->pools) plan.out.push_back(plan_leaving(pool, request));
  }
  const bool restores = plan.act != Act::kResume || request.policy != Backup::kNone;
  for (Tag* tag : plan.into_tags) {
    for (auto& [ordinal, pool] : tag->pools) plan.into.push_back(plan_arriving(pool, restores));
  }
  add_rows(tags.out, State::kPaused, plan.rows);
  add_rows(tags.into, State::kMapped, plan.rows);
  return plan;
}

}  // namespace memsaver
