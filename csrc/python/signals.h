// signals: Python's signal handlers kept from cutting what must be done as a whole.
//
// Python calls a signal's handler on its main thread, between any two instructions of Python code,
// and an exception out of a handler leaves that code half done. While a SignalsDeferred lives, each
// handler of Python's is replaced by one that only notes the signal; the handlers are called at the
// end. As for a signal that a process blocks, one that comes several times is handled once: else
// handlers that begin transitions themselves, in which further signals come, would multiply. On
// other threads, where no handler runs, it does nothing.
#pragma once

#include <pybind11/pybind11.h>
#include <signal.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace memsaver::python {

namespace py = pybind11;

// What handlers raised; the first error counts.
using Raised = std::optional<py::error_already_set>;

class SignalsDeferred {
 public:
  // `is_patient`: waiting for a tag is deferred too; else a handler that raises ends such a wait.
  // Throws what a handler raises before anything is deferred; if patient, finish() raises it.
  explicit SignalsDeferred(bool is_patient);
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;

  // Ends the deferral and calls the handlers of the signals that came; what they raised.
  Raised finish();

  // While a call waits for a tag, unless the deferral is patient: calls the handlers of the signals
  // that came. False with Python's error set if one raised.
  static bool deliver_in_wait();

  // In a forked child, whose main thread may be another: the handlers as they were.
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
  // Whether it was replaced: false on a thread that may not set handlers.
  static bool set_handler(int number, const py::object& handler, const struct sigaction& action,
                          Raised& raised, bool insist);
  static void deliver(std::vector<Signal> came, Raised& raised);

  void restore();

  bool is_active_ = false;  // the outermost one of the main thread
  bool is_nested_ = false;  // a further one of that thread
  bool was_patient_ = false;
  Raised raised_;

  // Of the main thread, under the GIL.
  static inline bool deferring_ = false;
  static inline unsigned long main_ = 0;  // the thread, while deferring_
  static inline bool patient_ = false;
  static inline std::vector<Replaced>* replaced_ = new std::vector<Replaced>;
  static inline std::vector<Signal>* came_ = new std::vector<Signal>;
  static inline std::map<int, py::object>* last_ = new std::map<int, py::object>;
};

// Calls function() with signals deferred. What a handler raised at the end counts more than what
// the function raised, or gave.
py::object uninterrupted(py::handle function, bool is_patient);

// `__enter__` and `__exit__` of a context manager that has `_enter()` and `_leave(type, error,
// traceback)`. Both are done as a whole; after an exception out of a handler at the end of the
// first it is left again. What `_leave` returns says whether the error is over.
py::object enter(py::handle manager);
py::object exit(py::handle manager, py::handle type, py::handle error, py::handle traceback);

// Likewise for one whose `_enter(place)` takes long, and so can be cut: `_undo(place, error)` is
// then called, as a whole, with the list that `_enter` was given to note what it has entered.
py::object enter_interruptibly(py::handle manager);

}  // namespace memsaver::python
