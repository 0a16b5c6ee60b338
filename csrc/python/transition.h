// transition: a pause, resume or swap that has begun, as a Python object.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memsaver_transitions.h"
#include "python/calls.h"

namespace memsaver::python {

inline py::list list_of_changes(ms_change* rows, size_t count) {
  return list_of(rows, count, [](const ms_change& c) {
    return py::make_tuple(text_of(c.tag), c.device, c.changed != 0, c.device_bytes, c.copied_bytes);
  });
}

// A transition that has begun. Running the transition releases its tags and then frees the
// transition. Any thread may use the object; every method needs the GIL.
class Transition {
 public:
  Transition() = default;
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;
  // Cancels a transition that was not run. Cancelling may wait for the devices' work.
  ~Transition() {
    if (result_) ms_list_free(result_->rows);
    if (!transition_) return;
    try {
      free_transition();
    } catch (...) {
      // The interpreter is ending this daemon thread, and a destructor cannot be unwound.
      for (;;) pause();
    }
  }

  // Takes ownership of a transition that has begun.
  void adopt(ms_transition* begun) { transition_.reset(begun, &ms_transition_free); }

  // Returns the transition's rows or throws its error. Runs the transition first, unless run_all()
  // has already run it. May be called only once.
  py::list run() {
    if (!result_) run_all({*this});
    const ms_run_result result = *result_;
    result_.reset();
    check(static_cast<ms_status>(result.status), result.error);
    return list_of_changes(result.rows, result.row_count);
  }

  // Runs transitions at the same time, like ms_transition_run_all, and stores their results for
  // run(). No Python code runs on the other threads.
  static void run_all(const std::vector<std::reference_wrapper<Transition>>& all) {
    std::vector<ms_transition*> begun(all.size());
    std::vector<ms_run_result> results(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].get().require_not_run();
      begun[i] = all[i].get().transition_.get();
      const auto here = begun.begin() + static_cast<std::ptrdiff_t>(i);
      require(std::find(begun.begin(), here, *here) == here, "a transition is in the list twice");
    }
    for (Transition& each : all) each.was_run_ = true;
    ms_error error{};
    ms_status status;
    {
      const WithoutGil released;
      status = ms_transition_run_all(begun.data(), begun.size(), results.data(), &error);
    }
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].get().keep(status == MS_OK ? results[i] : ms_run_result{status, 0, nullptr, error});
    }
  }

  // Sets the caller's description. Call this function before run().
  void set_caller(const std::string& caller) {
    require_not_run();
    without_gil([&](ms_error* error) {
      return ms_transition_set_caller(transition_.get(), caller.c_str(), error);
    });
  }

  // Returns the number of bytes copied so far and the total number of bytes to copy. After the run,
  // returns the final values.
  std::pair<uint64_t, uint64_t> progress() const {
    return transition_ ? read_progress() : progress_;
  }

  void wait_stream(uint64_t stream) {
    unless_over([&](ms_transition* transition, ms_error* error) {
      return ms_transition_wait_stream(transition, pointer(stream), error);
    });
  }

  // If `stream` has no value, the calling thread waits.
  void wait_ranges(const std::vector<Pair>& ranges, std::optional<uint64_t> stream) {
    const std::vector<ms_range> wanted = ranges_of(ranges);
    void* const waiting = stream ? pointer(*stream) : nullptr;
    unless_over([&](ms_transition* transition, ms_error* error) {
      return ms_transition_wait_ranges(transition, wanted.data(), wanted.size(),
                                       stream ? &waiting : nullptr, error);
    });
  }

  // Cancels the transition, unless run() was called.
  void give_up() {
    if (!was_run_) free_transition();
  }

 private:
  // Calls `wait`, unless the transition has ended: in that case, every stream is already ordered
  // after the transition.
  template <typename Wait>
  void unless_over(Wait wait) {
    const std::shared_ptr<ms_transition> transition = transition_;
    if (!transition) return require(has_succeeded_, "the transition failed or was cancelled");
    without_gil([&](ms_error* error) { return wait(transition.get(), error); });
  }

  void keep(const ms_run_result& result) {
    result_ = result;
    has_succeeded_ = result.status == MS_OK;
    progress_ = read_progress();
    free_transition();
  }

  void require_not_run() const {
    require(transition_ && !was_run_, "the transition was cancelled or already run");
  }

  static void require(bool holds, const char* otherwise) {
    ms_error error{};
    std::snprintf(error.message, sizeof(error.message), "%s", otherwise);
    check(holds ? MS_OK : MS_INVALID_STATE, error);
  }

  std::pair<uint64_t, uint64_t> read_progress() const {
    std::pair<uint64_t, uint64_t> progress{0, 0};
    ms_transition_progress(transition_.get(), &progress.first, &progress.second);
    return progress;
  }

  // Frees the transition after the threads that wait for it in wait_stream() have returned.
  void free_transition() {
    std::shared_ptr<ms_transition> last = std::move(transition_);
    const WithoutGil released;
    while (last.use_count() > 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
    last.reset();
  }

  std::shared_ptr<ms_transition> transition_;
  bool was_run_ = false, has_succeeded_ = false;
  std::optional<ms_run_result> result_;  // after run_all() and before run()
  std::pair<uint64_t, uint64_t> progress_{0, 0};
};

// Begins a transition. `begin` receives the pointer to set and the ms_error to fill.
template <typename Begin>
std::unique_ptr<Transition> begun(Begin begin) {
  auto made = std::make_unique<Transition>();
  ms_transition* transition = nullptr;
  interruptibly([&](ms_error* error) { return begin(&transition, error); });
  made->adopt(transition);
  return made;
}

}  // namespace memsaver::python
