// log: failures that can reach no caller (a destructor's, a hook's), kept until somebody asks for
// them.
//
// Python takes them after each of its calls and makes a MemsaverWarning of each. Any thread; never
// throws.
#pragma once

#include <string>

namespace memsaver {

// Keeps the first 64; later ones are counted in the last one's place.
void warn(const std::string& text) noexcept;

// The same for destructors: the text is made inside, and lost where there is no memory for it.
template <typename MakeText>
void warn_of(MakeText make_text) noexcept {
  try {
    warn(make_text());
  } catch (...) {
  }
}

// Takes the oldest; false when there is none.
bool next_warning(std::string* text) noexcept;

}  // namespace memsaver
