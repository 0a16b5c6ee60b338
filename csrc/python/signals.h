// signals: deferral of Python's signal handlers, for calls that must not be interrupted halfway.
//
// Python calls a signal's handler on its main thread, between any two instructions of Python code,
// and an exception of a handler leaves that code half done. While a SignalsDeferred exists, each
// Python handler is replaced by one that only records the signal; the handlers are called at the
// end. A signal that comes several times is handled once, as one that a process blocks. Otherwise
// handlers that begin transitions, during which more signals come, would multiply. On other
// threads, which run no handlers, a SignalsDeferred does nothing.
//
// Threads: every function needs the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <signal.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace memsaver::python {

namespace py = pybind11;

// The first exception that a handler raised, if any.
using Raised = std::optional<py::error_already_set>;

class SignalsDeferred {
 public:
  // `is_patient`: handlers are deferred also during waits for a tag. Otherwise they run in such a
  // wait, and an exception of a handler ends it.
  // Throws the exception of a handler that runs before the deferral begins; if `is_patient`,
  // finish() returns it instead.
  explicit SignalsDeferred(bool is_patient);
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;

  // Ends the deferral, calls the handlers of the recorded signals, and returns their exception.
  Raised finish();

  // Calls the handlers of the recorded signals while a call waits for a tag, unless the deferral is
  // patient. Returns false, with Python's error set, if one raised.
  static bool deliver_in_wait();

  // Restores the handlers in a forked child, whose main thread may be another, and drops signals.
  static void forget();

 private:
  struct Replaced {
    int number;
    py::object handler;
    struct sigaction action;
  };
  struct Signal {
    int number;
    py::object frame;
  };

  static PyObject* note(PyObject* self, PyObject* args);
  static py::object signal_module() { return py::module_::import("_signal"); }
  static const py::object& noter();
  // Sets a handler. Returns false on a thread that may not set handlers, or, unless `insist`, after
  // a pending handler raised.
  static bool set_handler(int number, const py::object& handler, const struct sigaction& action,
                          Raised& raised, bool insist);
  static void deliver(std::vector<Signal> came, Raised& raised);

  void restore();

  bool is_active_ = false;  // this is the main thread's outermost deferral
  bool is_nested_ = false;  // this is a nested deferral of the main thread
  bool was_patient_ = false;
  Raised raised_;

  // State of the main thread's deferrals, under the GIL.
  static inline bool deferring_ = false;
  static inline unsigned long main_ = 0;  // the main thread's ident, while deferring_
  static inline bool patient_ = false;
  static inline std::vector<Replaced>* replaced_ = new std::vector<Replaced>;
  static inline std::vector<Signal>* came_ = new std::vector<Signal>;
  static inline std::map<int, py::object>* last_ = new std::map<int, py::object>;
};

// Calls function() with signals deferred, and returns its result. If a handler raises at the end,
// throws that exception instead of returning the result or throwing function()'s exception.
py::object uninterrupted(py::handle function, bool is_patient);

// `__enter__` and `__exit__` of a context manager that has `_enter()` and `_leave(type, error,
// traceback)`. No handler runs within either. If a handler raises at the end of `_enter()`,
// `_leave()` is called before the exception is thrown. exit() returns the result of `_leave()`,
// which says whether the error is suppressed.
py::object enter(py::handle manager);
py::object exit(py::handle manager, py::handle type, py::handle error, py::handle traceback);

// `__enter__` of a context manager whose `_enter(place)` takes long and so may be interrupted by
// handlers. `_enter` appends to the list `place` what it has entered; if it raises,
// `_undo(place, error)` is called with signals deferred.
py::object enter_interruptibly(py::handle manager);

}  // namespace memsaver::python
