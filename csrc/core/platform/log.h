// log: stores failures that cannot be returned to a caller, such as those in a destructor or a
// hook, until they are queried.
//
// Python code queries the failures after each of its calls and emits a MemsaverWarning for each
// failure. Any thread may call these functions, which never throw.
#pragma once

#include <string>

namespace memsaver {

// Stores the first 64 failures; one additional entry counts any further failures.
void warn(const std::string& text) noexcept;

// Like warn(), but for destructors: calls `make_text` for the text, and drops the failure if there
// is no memory for the text.
template <typename MakeText>
void warn_of(MakeText make_text) noexcept {
  try {
    warn(make_text());
  } catch (...) {
  }
}

// Removes the oldest failure and writes it to `text`. Returns false if there is no failure.
bool next_warning(std::string* text) noexcept;

}  // namespace memsaver
