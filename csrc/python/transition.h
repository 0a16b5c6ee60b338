// transition: a pause, a resume or a swap that was begun, as an object of Python's.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "memsaver.h"
#include "python/calls.h"

namespace memsaver::python {

inline py::list list_of_changes(ms_change* rows, size_t count) {
  return list_of(rows, count, [](const ms_change& c) {
    return py::make_tuple(text_of(c.tag), c.device, c.changed != 0, c.device_bytes, c.copied_bytes);
  });
}

// A transition that was begun; it is freed as soon as it was run, which lets its tags go. Any
// thread may call it, under the GIL.
class Transition {
 public:
  Transition() = default;
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;
  // One that was not run is given up, which may take as long as the devices' work.
  ~Transition() {
    if (!transition_) return;
    try {
      let_go();
    } catch (...) {
      // The interpreter is ending this thread, a daemon's, and a destructor cannot be unwound.
      for (;;) pause();
    }
  }

  // Makes it the one that has been begun.
  void adopt(ms_transition* begun) { transition_.reset(begun, &ms_transition_free); }

  // Once.
  py::list run() {
    require(transition_ && !was_run_, "the transition was given up, or run before");
    was_run_ = true;
    ms_change* rows = nullptr;
    size_t count = 0;
    ms_error error{};
    ms_status status;
    {
      const WithoutGil released;
      status = ms_transition_run(transition_.get(), &rows, &count, &error);
    }
    has_succeeded_ = status == MS_OK;
    progress_ = read_progress();
    let_go();
    check(status, error);
    return list_of_changes(rows, count);
  }

  // Lets another thread run the transition. Call it before run().
  void hand_over() {
    require(transition_ && !was_run_, "the transition was given up, or run before");
    without_gil([&](ms_error* error) { return ms_transition_hand_over(transition_.get(), error); });
  }

  // Before run().
  void set_caller(const std::string& caller) {
    require(transition_ && !was_run_, "the transition was given up, or run before");
    without_gil([&](ms_error* error) {
      return ms_transition_set_caller(transition_.get(), caller.c_str(), error);
    });
  }

  // Bytes done and in all; as they were in the end, once it was run.
  std::pair<uint64_t, uint64_t> progress() const {
    return transition_ ? read_progress() : progress_;
  }

  void wait_stream(uint64_t stream) {
    const std::shared_ptr<ms_transition> transition = transition_;
    if (!transition) {
      require(has_succeeded_, "the transition failed, or was given up");
      return;  // all is done, whatever the stream
    }
    without_gil([&](ms_error* error) {
      return ms_transition_wait_stream(transition.get(), pointer(stream), error);
    });
  }

  // One that was not run never happened. After run() nothing.
  void give_up() {
    if (!was_run_) let_go();
  }

 private:
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

  // Frees it. Threads that wait for it on a stream leave now that it is over.
  void let_go() {
    std::shared_ptr<ms_transition> last = std::move(transition_);
    const WithoutGil released;
    while (last.use_count() > 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
    last.reset();
  }

  std::shared_ptr<ms_transition> transition_;
  bool was_run_ = false, has_succeeded_ = false;
  std::pair<uint64_t, uint64_t> progress_{0, 0};
};

// `begin` gets the place for the transition, and the ms_error to fill.
template <typename Begin>
std::unique_ptr<Transition> begun(Begin begin) {
  auto made = std::make_unique<Transition>();
  ms_transition* transition = nullptr;
  interruptibly([&](ms_error* error) { return begin(&transition, error); });
  made->adopt(transition);
  return made;
}

}  // namespace memsaver::python
