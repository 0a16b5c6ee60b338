// allocation: memory handed out and taken back, and the right to change a tag's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/registry.h"

namespace memsaver {

// The exclusive right to change the memory of some tags, and the registry's lock, in one. Waits
// until nobody holds any of the tags, and takes all at once, so that two threads cannot wait for
// each other. The holder gives up the lock for whatever takes time. At the end, what was freed
// meanwhile is given back and the tags are let go.
class Hold {
 public:
  // `lock` is the registry's, held.
  Hold(std::unique_lock<std::mutex> lock, std::vector<Tag*> tags);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }

  // Lets go of all but these. Under the lock.
  void keep_only(const std::vector<Tag*>& tags);

  void unlock() { lock_.unlock(); }
  void lock() {
    if (!lock_.owns_lock()) lock_.lock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
  std::vector<Tag*> tags_;
};

// Device memory of a tag: aligned to kBlockBytes, and from the granularity on to that. Contents are
// undefined. Waits while the tag is held. Throws kInvalidState when the tag is paused,
// kOutOfDeviceMemory (nothing is kept), kDriverFailed. Makes no call that a stream capture forbids.
uint64_t allocate(Tag& tag, Device& device, uint64_t bytes);

// Lets devices that came into use since the last call reach the memory that is mapped already.
// Waits for held tags. Quick where nothing changed. Memory that a device may not be let to is a
// warning. Throws kDriverFailed where the driver does not say which devices are in use.
void share_with_active_devices();

// Gives it back, in any state of the tag: at once, or by whoever holds the tag in a transition.
// Waits for the device's work before memory goes back to the driver or to the next allocation.
// Throws kNotOurs for foreign addresses, kInvalidArgument for an address that is not the start of a
// live allocation.
void deallocate(uint64_t address);

}  // namespace memsaver
