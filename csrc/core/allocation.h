// allocation: memory handed out and taken back, and the right to change a tag's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/registry.h"
#include "core/reservation.h"

namespace memsaver {

// The exclusive right to change the memory of some tags, combined with the registry's lock. The
// constructor waits as `need` says (kMemory or kTransition) and takes all tags at once, so that two
// threads cannot wait for each other. The thread that made it owns it until it hands it over. The
// owner unlocks during slow work. The destructor releases the memory that was freed during the
// hold, then the tags.
class Hold {
 public:
  // `lock` is the registry's, locked. Throws kInvalidState as wait_for_tags, and unlocks `lock`.
  Hold(std::unique_lock<std::mutex> lock, std::vector<Tag*> tags, Need need = Need::kMemory);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }

  // Sets the owner: the calling thread, or 0 until another thread calls this. Under the lock.
  void set_owner(uint64_t thread) { claim_.owner = thread; }
  // Returns whether the calling thread owns the hold. Under the lock.
  bool is_mine() const { return claim_.owner == this_thread(); }

  // Releases all tags but these. Under the lock.
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

// Allocates device memory of a tag and returns its address, which is aligned to kBlockBytes, or to
// the granularity if `bytes` reaches it. Contents are undefined. Waits while the tag is held.
// Throws kInvalidState if the tag is paused or the wait would never end, kOutOfDeviceMemory (and
// keeps nothing), kDriverFailed. Makes no call that a stream capture forbids.
uint64_t allocate(Tag& tag, Device& device, uint64_t bytes);

// Lets devices that came into use since the last call reach the memory that is already mapped.
// Waits for held tags, but skips tags whose wait would never end; the next call tries these again.
// Returns quickly if nothing changed. Warns of memory that a device cannot be allowed to reach.
// Throws kDriverFailed if the driver does not report which devices are in use.
void share_with_active_devices();

// Gives it back, in any state of the tag: at once, or by whoever holds the tag in a transition.
// Waits for the device's work before memory goes back to the driver or to the next allocation.
// Throws kNotOurs for foreign addresses, kInvalidArgument for an address that is not the start of a
// live allocation.
void deallocate(uint64_t address);

}  // namespace memsaver
