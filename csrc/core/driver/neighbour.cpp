#include "core/driver/neighbour.h"

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/platform/log.h"
#include "core/platform/options.h"
#include "core/platform/status.h"

namespace memsaver {
namespace {

constexpr int kNone = -1;

[[noreturn]] void refuse(int wanted, const std::string& why) {
  throw Error(Status::kBadConfig, "backup='peer' cannot use device " + std::to_string(wanted) +
                                      " (option peer, MEMSAVER_PEER): " + why +
                                      "; choose another device, 'auto', or backup='host'");
}

void require_usable(int wanted, int own) {
  if (wanted >= Device::count()) {
    refuse(wanted, "this process sees " + std::to_string(Device::count()) + " devices");
  }
  if (wanted == own) refuse(wanted, "the memory to save is on it");
  if (!Device::can_access(own, wanted)) {
    refuse(wanted, "device " + std::to_string(own) + " has no peer access to it");
  }
}

int choose(int own) {
  std::vector<int> accessible;
  for (int other = 0; other < Device::count(); ++other) {
    if (other != own && Device::can_access(own, other)) accessible.push_back(other);
  }
  if (accessible.empty()) {
    warn("device " + std::to_string(own) +
         " has peer access to no other device, so backup='peer' uses pinned host memory");
    return kNone;
  }
  if (accessible.size() == 1) return accessible.front();
  int best = accessible.front();
  uint64_t most = 0;
  for (const int other : accessible) {
    uint64_t free_bytes = 0;
    try {
      free_bytes = Device::probe_free_bytes(other);
    } catch (const Error& error) {
      if (error.status != Status::kOutOfDeviceMemory) throw;  // no room for a context
    }
    if (free_bytes <= most) continue;
    best = other;
    most = free_bytes;
  }
  return best;
}

}  // namespace

Device* neighbour_of(const Device& device) {
  const uint64_t wanted = device_option(Option::peer);
  if (wanted != kAnyDevice) {
    require_usable(static_cast<int>(wanted), device.ordinal());
    return &Device::get(static_cast<int>(wanted));
  }
  // Chosen once, because a query of a device without a context starts a context, which is slow.
  static std::mutex* const mutex = new std::mutex;
  static auto* const chosen = new std::map<int, int>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = chosen->find(device.ordinal());
  if (found == chosen->end()) {
    found = chosen->emplace(device.ordinal(), choose(device.ordinal())).first;
  }
  return found->second == kNone ? nullptr : &Device::get(found->second);
}

}  // namespace memsaver
