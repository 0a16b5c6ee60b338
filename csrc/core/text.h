// text: how sizes and lists are written in messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// "1.50 GiB (1610612736 bytes)"; below one KiB only the bytes.
std::string format_bytes(uint64_t bytes);

// "'a', 'b'"; "none" when empty; the first twenty, and how many more.
std::string format_names(const std::vector<std::string>& names);

// Whether it is UTF-8, as tags are.
bool is_utf8(const std::string& text);

// A name in quotes, cut to 60 bytes at a UTF-8 boundary.
std::string quoted(const std::string& name);

}  // namespace memsaver
