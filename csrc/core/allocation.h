// allocation: memory handed out and taken back, and the right to change a tag's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/registry.h"
#include "core/reservation.h"

namespace memsaver {

// The exclusive right to change the memory of some tags, and the registry's lock, in one. Waits
// for what `need` says (kMemory or kTransition) and takes all tags at once, so that two threads
// cannot wait for each other. It belongs to the thread that made it, until that one hands it over.
// The owner unlocks for whatever takes time. The end releases the memory that was freed meanwhile,
// then the tags.
class Hold {
 public:
  // `lock` is the registry's, held. Throws kInvalidState as wait_for_tags; then `lock` is released.
  Hold(std::unique_lock<std::mutex> lock, std::vector<Tag*> tags, Need need = Need::kMemory);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }

  // The thread that goes on with it: the calling one, or (0) one that will call this. Under the
  // lock.
  void set_owner(uint64_t thread) { claim_.owner = thread; }
  // Whether the calling thread owns it. Under the lock.
  bool is_mine() const { return claim_.owner == this_thread(); }

  // Lets go of all but these. Under the lock.
  void keep_only(const std::vector<Tag*>& tags);

  void unlock() { lock_.unlock(); }
  void lock() {
    if (!lock_.owns_lock()) lock_.lock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
  std::vector<Tag*> tags_;
  Claim claim_;
};

// Device memory of a tag: aligned to kBlockBytes, and from the granularity on to that. Contents are
// undefined. Waits while the tag is held. Throws kInvalidState when the tag is paused or the wait
// would never end, kOutOfDeviceMemory (nothing is kept), kDriverFailed. Makes no call that a stream
// capture forbids.
uint64_t allocate(Tag& tag, Device& device, uint64_t bytes);

// Lets devices that came into use since the last call reach the memory that is mapped already.
// Waits for held tags, except those that wait for this thread, which the next call looks at again.
// Quick where nothing changed. Memory that a device may not be let to is a
// warning. Throws kDriverFailed where the driver does not say which devices are in use.
void share_with_active_devices();

// Gives it back, in any state of the tag: at once, or by whoever holds the tag in a transition.
// Waits for the device's work before memory goes back to the driver or to the next allocation.
// Throws kNotOurs for foreign addresses, kInvalidArgument for an address that is not the start of a
// live allocation.
void deallocate(uint64_t address);

}  // namespace memsaver
