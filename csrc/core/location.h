// location: where an address lies: in which tag's memory, since when and by whom in its state.
#pragma once

#include <cstdint>

#include "core/range.h"
#include "core/registry.h"

namespace memsaver {

struct Location {
  const Tag* tag;
  int device;
  State state;
  Range block;  // the live allocation around the address; 0 bytes: there is none
  Mark mark;    // of the state
};

// Makes no driver call, so that it answers when the context is lost, and waits for no transition.
// Takes the registry's lock. Throws kNotOurs.
Location locate(uint64_t address);

}  // namespace memsaver
