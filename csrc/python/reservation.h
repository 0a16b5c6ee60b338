// reservation: the right to begin transitions of some tags, as a Python object.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "memsaver_transitions.h"
#include "python/calls.h"

namespace memsaver::python {

// A context manager that owns an ms_reservation for one block. Without tags, the object reserves
// nothing. The destructor releases the reservation if it has not been released.
//
// Threads: any. All methods release the GIL. take() and wait() may wait for tags; on the main
// thread, they run signal handlers during the wait. The other methods do not wait for tags.
class Reservation {
 public:
  Reservation(std::vector<std::string> tags, double seconds)
      : tags_(std::move(tags)), seconds_(seconds) {}
  ~Reservation() { ms_reservation_free(reservation_); }  // never waits
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Waits up to about `seconds` seconds (negative: without a limit) for the tags, then reserves
  // them. Raises the errors of ms_reserve, InvalidStateError if the wait exceeds this time, and any
  // exception from a signal handler.
  void take() {
    if (tags_.empty() || reservation_) return;
    const std::vector<const char*> names = pointers(tags_);
    ms_reservation* taken = nullptr;
    interruptibly(
        [&](ms_error* error) { return ms_reserve(names.data(), names.size(), &taken, error); },
        seconds_);
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

  // Waits at most `seconds` seconds (negative: without a limit) until the reservation is released.
  // Returns whether it was released.
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
  const double seconds_;
  ms_reservation* reservation_ = nullptr;
};

}  // namespace memsaver::python
