#include "core/driver/deferred_release.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/driver/driver.h"
#include "core/platform/log.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

using Parts = DriverObject::Parts;

// Makes the destroy call once. Returns false if the driver refused the call (sets `*refusal`) or if
// the object's context cannot be entered (leaves `*refusal` empty).
bool try_destroy(const Parts& parts, std::optional<CUresult>* refusal) noexcept try {
  const CUresult result = parts.destroy();
  if (result == CUDA_SUCCESS || is_shutdown(result)) return true;
  *refusal = result;
  return false;
} catch (...) {
  return false;
}

void add(Deferred& figures, const Parts& parts) noexcept {
  ++figures.objects;
  if (parts.kind->counts_as == ObjectKind::Memory::kDevice) figures.device_bytes += parts.bytes;
  if (parts.kind->counts_as == ObjectKind::Memory::kHost) figures.host_bytes += parts.bytes;
}

struct List {
  std::mutex mutex;              // guards the next two fields
  std::vector<Parts> parts;      // its capacity is at least `objects`
  size_t objects = 0;            // deferred objects, and live ones whose release may be deferred
  std::atomic<size_t> count{0};  // the size of `parts`; written under the mutex
};

List& list() {
  static List* const made = new List;  // never destroyed
  return *made;
}

void reserve_room() {
  List& all = list();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.objects == all.parts.capacity()) all.parts.reserve(std::max<size_t>(64, 2 * all.objects));
  ++all.objects;
}

void return_room() noexcept {
  List& all = list();
  std::lock_guard<std::mutex> lock(all.mutex);
  --all.objects;
}

// Moves an object to the list, into the room that was reserved for it.
void add_to_list(Parts&& parts) noexcept {
  List& all = list();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.parts.push_back(std::move(parts));
  all.count = all.parts.size();
}

}  // namespace

CUresult Parts::destroy() const {
  std::optional<ContextScope> current;
  std::optional<DeviceScope> relaxed;
  if (kind->scope == ObjectKind::Scope::kContext) current.emplace(*context);
  if (kind->scope == ObjectKind::Scope::kDevice) relaxed.emplace(*context);
  return kind->destroy(object, bytes);
}

DriverObject::DriverObject(const ObjectKind& kind, const Context* context) {
  if (kind.memory) reserve_room();
  parts_.kind = &kind;
  parts_.context = context;
}

DriverObject::DriverObject(DriverObject&& other) noexcept
    : parts_(std::exchange(other.parts_, Parts{})) {}

DriverObject& DriverObject::operator=(DriverObject&& other) noexcept {
  std::swap(parts_, other.parts_);
  return *this;
}

DriverObject::~DriverObject() {
  release();
  if (parts_.kind && parts_.kind->memory) return_room();
}

void DriverObject::own(uint64_t object, uint64_t bytes, HostClaim claim) noexcept {
  parts_.object = object;
  parts_.bytes = bytes;
  parts_.claim = std::move(claim);
}

void DriverObject::change_kind(const ObjectKind& kind, HostClaim claim) noexcept {
  parts_.kind = &kind;
  parts_.claim = std::move(claim);
}

void DriverObject::destroy() {
  check(parts_.destroy(), parts_.kind->call);
  own(0);
}

bool DriverObject::release() noexcept {
  if (!*this) return true;
  const ObjectKind& kind = *parts_.kind;
  std::optional<CUresult> refusal;
  // Kinds that are not deferred get a second attempt here, because they are not retried later.
  bool is_gone = try_destroy(parts_, &refusal);
  if (!is_gone && !kind.memory) is_gone = try_destroy(parts_, &refusal);
  if (!is_gone && refusal) {
    warn_of([&] {
      std::string text = describe(*refusal, kind.call);
      if (kind.memory) {
        text += "; " + format_bytes(parts_.bytes) + " of " + kind.memory +
                " stay allocated until the next transition or trim() can release them";
      }
      return text;
    });
  }
  if (is_gone || !kind.memory) {
    own(0);
  } else {
    defer();
  }
  return is_gone;
}

void DriverObject::defer() noexcept { add_to_list(std::exchange(parts_, Parts{})); }

DriverObject DriverObject::take_deferred(const ObjectKind& kind, uint64_t bytes) noexcept {
  DriverObject taken;
  List& all = list();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto at = std::find_if(all.parts.begin(), all.parts.end(), [&](const Parts& parts) {
    return parts.kind == &kind && parts.bytes >= bytes;
  });
  if (at == all.parts.end()) return taken;
  taken.parts_ = std::move(*at);
  all.parts.erase(at);
  all.count = all.parts.size();
  return taken;
}

Deferred deferred_releases() noexcept {
  List& all = list();
  std::lock_guard<std::mutex> lock(all.mutex);
  Deferred held;
  for (const Parts& parts : all.parts) add(held, parts);
  return held;
}

Deferred retry_releases(Retry which) noexcept {
  Deferred released;
  List& all = list();
  if (all.count == 0) return released;
  std::unique_lock<std::mutex> lock(all.mutex);
  for (size_t left = all.parts.size(); left > 0 && !all.parts.empty(); --left) {
    Parts parts = std::move(all.parts.front());
    all.parts.erase(all.parts.begin());
    const bool waits = parts.kind->waits;
    std::optional<CUresult> refusal;
    bool is_gone = false;
    if (!waits) {
      is_gone = try_destroy(parts, &refusal);
    } else if (which == Retry::kAll) {
      lock.unlock();  // the object's room in the list stays reserved
      is_gone = try_destroy(parts, &refusal);
      lock.lock();
    }
    if (is_gone) {
      add(released, parts);
      --all.objects;
    } else {
      all.parts.push_back(std::move(parts));
    }
  }
  all.count = all.parts.size();
  return released;
}

}  // namespace memsaver
