#include "core/memory/region.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "core/memory/reservation.h"
#include "core/platform/log.h"
#include "core/platform/text.h"

namespace memsaver {

namespace regions {
std::atomic<int> open_anywhere{1};
}

namespace {

constexpr uint64_t kAllDevices = ~0ull;

struct Entry {
  Tag* tag;          // null: a disabled section
  uint64_t devices;  // bit n: the region applies to device n
};

// A thread's open regions. A thread that ends inside a region leaves it.
struct Stack {
  std::vector<Entry> entries;
  ~Stack();
};

thread_local Stack stack;

// The top of the stack, if any, in separate variables, which need no construction.
thread_local Tag* innermost = nullptr;
thread_local bool inside = false;

void push(Tag* tag) {
  stack.entries.push_back({tag, kAllDevices});
  innermost = tag;
  inside = true;
  regions::open_anywhere.fetch_add(1);
}

std::map<void*, Tag*>& bound_streams() {  // requires the registry's lock
  static auto* const map = new std::map<void*, Tag*>;
  return *map;
}

void leave(Tag* tag) {
  if (!tag) return;
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  --tag->open_regions;
}

Stack::~Stack() {
  regions::open_anywhere.fetch_sub(static_cast<int>(entries.size()));
  for (const Entry& entry : entries) leave(entry.tag);
  inside = false;
}

Tag* process_tag_from_environment() noexcept try {
  const char* name = std::getenv("MEMSAVER_TAG");
  if (!name || !*name) return nullptr;
  if (!is_utf8(name)) {
    warn("MEMSAVER_TAG is not valid UTF-8, so it has no effect");
    return nullptr;
  }
  if (std::strchr(name, '\x1f')) {
    warn("MEMSAVER_TAG contains U+001F, which is reserved for parts of tags, so it has no effect");
    return nullptr;
  }
  const char* backup = std::getenv("MEMSAVER_BACKUP");
  const std::string wanted = backup && *backup ? backup : "none";
  std::optional<Backup> policy;
  for (const Backup known :
       {Backup::kNone, Backup::kHost, Backup::kPageable, Backup::kDisk, Backup::kPeer}) {
    if (wanted == name_of(known)) policy = known;
  }
  if (!policy) {
    warn("MEMSAVER_BACKUP=" + quoted(wanted) +
         " is not a backup (none, host, pageable, disk, peer), so MEMSAVER_TAG has no effect");
    return nullptr;
  }
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  Tag& tag = registry.tag(name);
  tag.policy = *policy;
  return &tag;
} catch (...) {
  return nullptr;
}

Tag* process_tag() noexcept {
  static Tag* const tag = [] {
    Tag* const found = process_tag_from_environment();
    if (!found) regions::open_anywhere.fetch_sub(1);
    return found;
  }();
  return tag;
}

// Opens a region of the tag. Acquires the registry's lock.
Tag& open(const std::string& name, std::optional<Backup> policy) {
  if (name.empty()) {
    throw Error(Status::kInvalidArgument,
                "a tag cannot be empty: give the region a name such as 'weights'");
  }
  process_tag();  // the environment's policy must not replace the policy of a region
  Registry& registry = Registry::instance();
  std::unique_lock<std::mutex> lock(registry.mutex);
  Tag& tag = registry.tag(name);
  // Wait for a transition in progress, as any conflicting call does.
  wait_for_tags(lock, {&tag}, Need::kSettled);
  if (tag.state == State::kPaused) {
    throw Error(Status::kInvalidState,
                "a region of tag " + quoted(name) +
                    " cannot be entered while the tag is paused: its new tensors would "
                    "have no memory; resume it first")
        .with_tag(name);
  }
  if (policy) tag.policy = *policy;
  ++tag.open_regions;
  ++registry.changes;
  return tag;
}

}  // namespace

void enter_region(const std::string& name, std::optional<Backup> policy) {
  stack.entries.reserve(stack.entries.size() + 1);
  push(&open(name, policy));
}

void enter_disabled() { push(nullptr); }

void exit_region() {
  if (stack.entries.empty()) {
    throw Error(Status::kInvalidState,
                "this thread is in no region: enter and leave a region on the same thread");
  }
  Tag* const tag = stack.entries.back().tag;
  stack.entries.pop_back();
  inside = !stack.entries.empty();
  innermost = inside ? stack.entries.back().tag : nullptr;
  regions::open_anywhere.fetch_sub(1);
  leave(tag);
}

void limit_region(uint64_t devices) {
  if (stack.entries.empty()) {
    throw Error(Status::kInvalidState, "this thread is in no region, so none can be limited");
  }
  stack.entries.back().devices = devices;
}

bool region_covers(int device) noexcept {
  if (!inside || device < 0 || device >= 64) return true;
  return (stack.entries.back().devices >> device & 1) != 0;
}

size_t region_depth() { return stack.entries.size(); }

void bind_stream(void* stream, const std::string& name, std::optional<Backup> policy) {
  Tag& tag = open(name, policy);
  Tag* previous = nullptr;
  try {
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    Tag*& bound = bound_streams()[stream];
    previous = bound;
    bound = &tag;
  } catch (...) {  // no host memory
    leave(&tag);
    throw;
  }
  leave(previous);
}

void unbind_stream(void* stream) {
  Tag* tag = nullptr;
  {
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    const auto found = bound_streams().find(stream);
    if (found == bound_streams().end()) {
      throw Error(Status::kInvalidState, "the stream is bound to no tag");
    }
    tag = found->second;
    bound_streams().erase(found);
  }
  leave(tag);
}

Tag* regions::find_current_tag() noexcept {
  if (inside) return innermost;
  Tag* const tag = process_tag();
  return tag && tag->accepting.load(std::memory_order_acquire) ? tag : nullptr;
}

Tag* current_tag(void* stream) {
  if (inside) return innermost;
  {
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    const auto found = bound_streams().find(stream);
    if (found != bound_streams().end()) return found->second;
  }
  return current_tag();
}

}  // namespace memsaver
