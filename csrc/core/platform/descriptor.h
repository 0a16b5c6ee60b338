// descriptor: the owner of a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

namespace memsaver {

// The destructor closes the descriptor. Move-only; a default-constructed or moved-from object owns
// nothing. An object may be used on any thread, but by only one thread at a time.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }

  int get() const { return number_; }  // -1 if the object owns nothing
  // Releases ownership and returns the descriptor, which the caller must close.
  int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

}  // namespace memsaver
