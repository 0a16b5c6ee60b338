#include "core/platform/text.h"

#include <cstdio>

namespace memsaver {

std::string format_bytes(uint64_t bytes) {
  static const char* const kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024; value /= 1024) ++unit;
  char digits[64];
  std::snprintf(digits, sizeof(digits), "%.3f", value);
  std::string text = digits;
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text + " " + kUnits[unit];
}

bool is_utf8(const std::string& text) {
  size_t following = 0;
  unsigned char least = 0x80, most = 0xBF;  // bounds of the next byte of a sequence
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (following > 0) {
      if (byte < least || byte > most) return false;
      --following;
      least = 0x80;
      most = 0xBF;
    } else if (byte >= 0xC2 && byte <= 0xF4) {
      following = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
      // Reject overlong forms, surrogates, and code points above U+10FFFF.
      if (byte == 0xE0) least = 0xA0;
      if (byte == 0xED) most = 0x9F;
      if (byte == 0xF0) least = 0x90;
      if (byte == 0xF4) most = 0x8F;
    } else if (byte >= 0x80) {
      return false;
    }
  }
  return following == 0;
}

std::string quoted(const std::string& name) {
  constexpr size_t kShown = 60;
  if (name.size() <= kShown) return "'" + name + "'";
  const auto is_continuation = [&](size_t at) {
    return (static_cast<unsigned char>(name[at]) & 0xC0) == 0x80;
  };
  size_t head = kShown / 2, tail = name.size() - kShown / 2;
  while (head > 0 && is_continuation(head)) --head;
  while (tail < name.size() && is_continuation(tail)) ++tail;
  return "'" + name.substr(0, head) + "..." + name.substr(tail) + "'";
}

std::string format_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  if (names.empty()) return "none";
  std::string text;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) {
    if (i > 0) text += ", ";
    text += quoted(names[i]);
  }
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

}  // namespace memsaver
