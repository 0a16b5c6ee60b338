// text: formats sizes and lists for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// Formats a size in the largest possible unit, such as "1.25 GiB". Three decimals distinguish sizes
// that differ by one page of device memory.
std::string format_bytes(uint64_t bytes);

// Returns the quoted names as a list, such as "'a', 'b'", or "none" if there are no names. The list
// contains at most twenty names, followed by the number of further names.
std::string format_names(const std::vector<std::string>& names);

// Returns whether the text is valid UTF-8, which is required for tags.
bool is_utf8(const std::string& text);

// Returns a name in quotes. A name longer than 60 bytes is shortened to its first and last 30
// bytes, at UTF-8 boundaries.
std::string quoted(const std::string& name);

}  // namespace memsaver
