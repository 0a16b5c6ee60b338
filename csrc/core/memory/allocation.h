// allocation: allocates and frees device memory, and defines the exclusive right to change a tag's
// memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory/registry.h"
#include "core/memory/reservation.h"

namespace memsaver {

// The exclusive right to change the memory of a set of tags, combined with the registry's lock. The
// constructor waits until the tags satisfy `need` (kMemory or kTransition), then acquires all of
// the tags at once, so that two threads cannot deadlock. The creating thread owns the Hold until
// set_owner() is called. The owner unlocks the registry during slow operations. The destructor
// first releases the memory that was freed while the Hold existed, and then releases the tags.
class Hold {
 public:
  // `lock` must own the registry's lock. Throws kInvalidState in the same cases as
  // wait_for_tags(), and then leaves `lock` unlocked.
  Hold(std::unique_lock<std::mutex> lock, std::vector<Tag*> tags, Need need = Need::kMemory);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  const std::vector<Tag*>& tags() const { return tags_; }

  // Sets the owning thread: the calling thread, or 0 if another thread will become the owner. Needs
  // the registry's lock.
  void set_owner(uint64_t thread) { claim_.owner = thread; }
  // Returns whether the calling thread owns the Hold. Requires the registry's lock.
  bool is_mine() const { return claim_.owner == this_thread(); }

  // Releases all tags except `tags`. Requires the registry's lock.
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

// Allocates device memory for a tag and returns its address. The address is aligned to kBlockBytes,
// or to the granularity if `bytes` is at least that large. The contents are undefined. Waits while
// a transition of the tag is in progress. May be called inside a stream capture.
// Errors: kInvalidState if the tag is paused or the wait would deadlock; kOutOfDeviceMemory if the
// device is full; kDriverFailed if a driver call fails. If this function fails, no memory is
// allocated.
uint64_t allocate(Tag& tag, Device& device, uint64_t bytes);

// Allows devices that have come into use since the last call to access memory that is already
// mapped. Waits for tags in use, but skips a tag if the wait would deadlock. Issues a warning if a
// device cannot access some of the memory; it can then still access the other memory. The next call
// retries the skipped tags and the refused memory. Returns quickly if no device came into use.
// Errors: kDriverFailed if the driver does not report which devices are in use.
void share_with_active_devices();

// Frees an allocation regardless of its tag's state, either at once or at the end of the transition
// that owns the tag. Waits for the device's work before the memory is released to the driver or
// reused.
// Errors: kNotOurs for a foreign address; kInvalidArgument if no live allocation starts at the
// address.
void deallocate(uint64_t address);

}  // namespace memsaver
