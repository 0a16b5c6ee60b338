// calls: calls C ABI functions from Python without the GIL, and converts their results to
// exceptions and Python lists.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memsaver.h"
#include "python/signals.h"

namespace memsaver::python {

namespace py = pybind11;

// Releases the GIL for its lifetime. Unlike the destructor of pybind11's gil_scoped_release, this
// destructor may throw: if a daemon thread reacquires the GIL during interpreter exit, Python
// unwinds the thread's stack to end the thread.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(false) { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Calls `body()` with the GIL and returns the result.
  template <typename Body>
  bool with_gil(Body body) {
    PyEval_RestoreThread(state_);
    const bool result = body();
    state_ = PyEval_SaveThread();
    return result;
  }

 private:
  PyThreadState* state_;
};

// Decodes text from the library and escapes invalid UTF-8, which can occur in a path.
inline py::str text_of(const char* text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text, static_cast<py::ssize_t>(std::strlen(text)), "backslashreplace");
  if (!decoded) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

// The function of memsaver.errors that creates exceptions. The function is looked up when the
// module is loaded, because finalizers at interpreter exit cannot import modules. The reference is
// never released.
inline py::handle error_of;

inline void find_errors() {
  error_of = py::object(py::module_::import("memsaver.errors").attr("error_of")).release();
}

inline void check(ms_status status, const ms_error& error) {
  if (status == MS_OK) return;
  const py::str message = text_of(error.message);
  const py::object raised =
      error_of(static_cast<int>(status), message, error.cuda_error, error.call, text_of(error.tag),
               error.needed_bytes, error.free_bytes, error.os_error, error.device);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  throw py::error_already_set();
}

// Makes the call without the GIL, and raises an exception if the call fails. The call receives the
// ms_error to fill.
template <typename Call>
inline void without_gil(Call call) {
  ms_error error{};
  ms_status status;
  {
    const WithoutGil released;
    status = call(&error);
  }
  check(status, error);
}

// Returns whether the interpreter is exiting. If it is, only the calling thread can still run
// Python code.
inline bool is_exiting() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// While this object exists, Python runs pending signal handlers during the calling thread's waits
// for tags. A wait ends if a handler raises an exception. It also ends if the interpreter exits,
// because by then Python has stopped the threads that own the tags. Python runs handlers only on
// the main thread, so other threads wait without running handlers. If the interpreter exits during
// a wait, these threads end when they acquire the GIL.
//
// `seconds` limits the waits (negative: no limit).
class HandlersInWaits {
 public:
  HandlersInWaits(WithoutGil& released, double seconds)
      : released_(syscall(SYS_gettid) == getpid() ? &released : nullptr),
        deadline_(after(seconds)) {
    if (!released_ && !deadline_) return;
    outer_ = innermost_;
    innermost_ = this;
    ms_while_waiting(&HandlersInWaits::look, this);
  }
  ~HandlersInWaits() {
    if (innermost_ != this) return;
    innermost_ = outer_;
    ms_while_waiting(outer_ ? &HandlersInWaits::look : nullptr, outer_);
  }
  HandlersInWaits(const HandlersInWaits&) = delete;
  HandlersInWaits& operator=(const HandlersInWaits&) = delete;

  // Returns whether the time limit ended a wait.
  bool is_late() const { return is_late_; }

 private:
  using Clock = std::chrono::steady_clock;

  static std::optional<Clock::time_point> after(double seconds) {
    constexpr double kForever = 1e9;  // a clock's range is limited
    if (!(seconds >= 0) || seconds >= kForever) return std::nullopt;
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  static int look(void* data) {
    auto& self = *static_cast<HandlersInWaits*>(data);
    if (self.deadline_ && Clock::now() >= *self.deadline_) {
      self.is_late_ = true;
      return 1;
    }
    const auto call = [] {
      return !is_exiting() && PyErr_CheckSignals() == 0 && SignalsDeferred::deliver_in_wait();
    };
    return !self.released_ || self.released_->with_gil(call) ? 0 : 1;
  }

  static inline thread_local HandlersInWaits* innermost_ = nullptr;
  WithoutGil* const released_;  // null except on the main thread
  const std::optional<Clock::time_point> deadline_;
  HandlersInWaits* outer_ = nullptr;
  bool is_late_ = false;
};

// Like without_gil(), but for a call that may wait for a tag. A signal handler's exception
// propagates. If `seconds` is not negative, each wait ends after about that time, with
// MS_INVALID_STATE.
template <typename Call>
inline void interruptibly(Call call, double seconds = -1) {
  ms_error error{};
  ms_status status;
  bool is_late;
  {
    WithoutGil released;
    const HandlersInWaits handlers(released, seconds);
    status = call(&error);
    is_late = handlers.is_late();
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  if (status == MS_INVALID_STATE && is_late) {
    std::snprintf(
        error.message, sizeof(error.message),
        "the wait for tag '%s' took longer than %g s, because another thread's transition "
        "or reservation of it did not end; nothing was changed: repeat the call after "
        "that, or with a longer timeout",
        error.tag, seconds);
  } else if (status == MS_INVALID_STATE && is_exiting()) {
    const size_t length = std::strlen(error.message);
    std::snprintf(error.message + length, sizeof(error.message) - length,
                  "; Python is exiting, and has stopped its other threads");
  }
  check(status, error);
}

template <typename Row, typename Convert>
inline py::list list_of(Row* rows, size_t count, Convert convert) {
  py::list list;
  for (size_t i = 0; i < count; ++i) list.append(convert(rows[i]));
  ms_list_free(rows);
  return list;
}

inline std::vector<const char*> pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> out;
  for (const std::string& text : texts) out.push_back(text.c_str());
  return out;
}

inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

using Pair = std::pair<uint64_t, uint64_t>;

inline std::vector<ms_range> ranges_of(const std::vector<Pair>& pairs) {
  std::vector<ms_range> out;
  for (const Pair& range : pairs) out.push_back({range.first, range.second});
  return out;
}

}  // namespace memsaver::python
