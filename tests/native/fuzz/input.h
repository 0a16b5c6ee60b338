// input: decodes a fuzzer's bytes into values. Values read beyond the end of the bytes are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace fuzz {

class Input {
 public:
  Input(const uint8_t* bytes, size_t count) : at_(bytes), left_(count) {}

  bool empty() const { return left_ == 0; }

  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *at_++;
  }

  size_t below(size_t bound) { return byte() % bound; }

  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }

  // Returns up to `most` nonzero bytes.
  std::string text(size_t most) {
    std::string made;
    for (size_t count = below(most + 1); count > 0; --count) {
      const uint8_t next = byte();
      if (next != 0) made.push_back(static_cast<char>(next));
    }
    return made;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

// Checks an invariant for every input. A violation terminates the process, and the fuzzer reports
// the violation.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace fuzz
