// text: formats sizes and lists for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// Formats a size in the largest possible unit, such as "1.25 GiB". Its three decimals distinguish
// sizes that differ by a page of device memory.
std::string format_bytes(uint64_t bytes);

// Returns "'a', 'b'"; "none" if empty; at most twenty names, then the number of further names.
std::string format_names(const std::vector<std::string>& names);

// Returns whether the text is valid UTF-8, as tags must be.
bool is_utf8(const std::string& text);

// Returns a name in quotes. A name longer than 60 bytes is shortened to its first and last 30
// bytes, at UTF-8 boundaries.
std::string quoted(const std::string& name);

}  // namespace memsaver
