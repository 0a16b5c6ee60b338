// location: the allocation and tag of an address, and the last transition of the tag.
#pragma once

#include <cstdint>

#include "core/memory/registry.h"
#include "core/platform/range.h"

namespace memsaver {

struct Location {
  const Tag* tag;
  int device;
  State state;
  Range block;                  // the live allocation that contains the address, or 0 bytes
  TransitionRecord transition;  // the transition that led to the state
};

// Returns the location of an address. Makes no driver call, so it works with a lost context, and
// does not wait for transitions. Takes the registry's lock. Throws kNotOurs.
Location locate(uint64_t address);

// Returns the name of the address's tag if the tag is paused or in a transition, otherwise null.
// The name is valid for the life of the process. Async-signal-safe; takes no lock.
const char* paused_tag(uint64_t address) noexcept;

}  // namespace memsaver
