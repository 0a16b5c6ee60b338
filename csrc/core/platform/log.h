// log: failures that cannot be returned to a caller (in a destructor or a hook), kept until
// queried.
//
// Python queries them after each of its calls and emits a MemsaverWarning for each. Any thread;
// never throws.
#pragma once

#include <string>

namespace memsaver {

// Keeps the first 64 failures; the last entry counts later ones.
void warn(const std::string& text) noexcept;

// Like warn, for destructors: calls `make_text`, and drops the failure if there is no memory for
// the text.
template <typename MakeText>
void warn_of(MakeText make_text) noexcept {
  try {
    warn(make_text());
  } catch (...) {
  }
}

// Removes and returns the oldest failure; false if there is none.
bool next_warning(std::string* text) noexcept;

}  // namespace memsaver
