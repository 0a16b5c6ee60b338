// reservation: the right to begin transitions of some tags, as an object of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "memsaver.h"
#include "python/calls.h"

namespace memsaver::python {

// A context manager over ms_reservation, for one block. Without tags it reserves nothing. What was
// not released is released with the object.
class Reservation {
 public:
  explicit Reservation(std::vector<std::string> tags) : tags_(std::move(tags)) {}
  ~Reservation() { ms_reservation_free(reservation_); }  // waits for nothing
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Waits for the tags and takes them.
  void take() {
    if (tags_.empty() || reservation_) return;
    const std::vector<const char*> names = pointers(tags_);
    ms_reservation* taken = nullptr;
    interruptibly(
        [&](ms_error* error) { return ms_reserve(names.data(), names.size(), &taken, error); });
    reservation_ = taken;
  }

  void release() {
    if (!reservation_) return;
    without_gil([&](ms_error* error) { return ms_reservation_release(reservation_, error); });
  }

  void hand_over() {
    if (!reservation_) return;
    without_gil([&](ms_error* error) { return ms_reservation_hand_over(reservation_, error); });
  }

  void take_over() {
    if (!reservation_) return;
    without_gil([&](ms_error* error) { return ms_reservation_take_over(reservation_, error); });
  }

  // Whether it was released within `seconds`; below zero: waits without a bound.
  bool wait(double seconds) {
    int is_over = 1;
    if (!reservation_) return true;
    interruptibly([&](ms_error* error) {
      return ms_reservation_wait(reservation_, seconds, &is_over, error);
    });
    return is_over != 0;
  }

 private:
  const std::vector<std::string> tags_;
  ms_reservation* reservation_ = nullptr;
};

}  // namespace memsaver::python
