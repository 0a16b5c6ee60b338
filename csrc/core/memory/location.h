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

// Returns the location of an address. Makes no driver call, so this function works even if the
// context is lost. Does not wait for transitions. Acquires the registry's lock. Throws kNotOurs.
Location locate(uint64_t address);

// Returns the name of the address's tag if the tag is paused or in a transition, otherwise null.
// The name is valid until the process exits. Async-signal-safe; acquires no lock.
const char* paused_tag(uint64_t address) noexcept;

}  // namespace memsaver
