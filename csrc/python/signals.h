// signals: deferral of Python's signal handlers, for calls that must not be interrupted halfway.
//
// Python calls a signal's handler on its main thread, between any two instructions of Python code,
// and a handler's exception leaves that code incomplete. While a SignalsDeferred exists, each
// Python handler is replaced by one that only records the signal. The rules:
//
// - The handlers are called at the end of the outermost block that defers signals, or earlier in a
//   kOpen block inside kBetween blocks.
// - A signal that arrives several times is handled once, like a signal that a process blocks.
//   Otherwise handlers that begin transitions, during which more signals arrive, would multiply.
// - If several handlers raise at the end, only the first exception is raised.
// - A handler that a program sets in a block stays set.
// - Blocks of all kinds nest, and may end in any order. A block that is destroyed without
//   finish() no longer defers signals; the handlers of recorded signals are called soon afterwards.
// - Blocks affect the main thread. On other threads, which run no handlers, they do nothing; in a
//   forked child they have ended.
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

enum class Deferral {
  kWhole,    // defers until the end or a wait for a tag; a handler's exception ends it
  kPatient,  // defers until the end, even while the block waits for a tag
  kBetween,  // like kPatient, except in a kOpen block inside
  kOpen,     // handlers run despite enclosing kBetween blocks; no effect on other kinds
};

class SignalsDeferred {
 public:
  // Throws the exception of a handler that runs before the deferral begins or, if kOpen, of a
  // recorded signal's handler. If kPatient, finish() returns the exception instead.
  explicit SignalsDeferred(Deferral kind);
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;

  // Ends the block. Calls the handlers of the recorded signals, unless an enclosing block defers
  // them, and returns their exception.
  Raised finish();

  // Calls the handlers of the recorded signals while a call waits for a tag, if every block allows
  // that. Returns false, with Python's error set, if a handler raised.
  static bool deliver_in_wait();

  // Restores the handlers in a forked child, whose main thread may be a different one, and discards
  // the recorded signals.
  static void forget();

 private:
  struct Replaced {
    int number;
    py::object handler;
    struct sigaction action;
    py::object before;  // the entry of `last_` for the signal
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
  // Returns whether signals are deferred now, or would be if the main thread waited for a tag.
  static bool defers(bool in_wait);
  // Adds a signal to `came_`, unless it is in the list.
  static void keep_waiting(Signal signal);
  // Removes the signals from `came_`, unless they are deferred, and returns them.
  static std::vector<Signal> take_due(bool in_wait);
  // Calls the handlers of these signals.
  static void deliver(Raised& raised, bool in_wait);
  static PyObject* call(const py::object& handler, const Signal& signal);

  void replace();
  void begin();
  void restore();
  bool end();  // returns false if the block had no effect, or has ended

  const Deferral kind_;
  bool is_active_ = false;  // it is in `blocks_`; only on the main thread
  bool is_shut_ = false;    // kOpen: a handler is running or has raised; further signals wait
  std::vector<Replaced> replaced_;
  Raised raised_;

  // State of the main thread; needs the GIL.
  static inline unsigned long main_ = 0;  // the main thread, while there are blocks
  static inline auto* blocks_ = new std::vector<SignalsDeferred*>;  // innermost last
  static inline auto* came_ = new std::vector<Signal>;
  static inline auto* last_ = new std::map<int, py::object>;  // the handlers behind noter()
};

// A SignalsDeferred as a Python context manager. No handler runs in its methods.
class DeferredBlock {
 public:
  void enter() { block_.emplace(Deferral::kBetween); }
  void leave();

 private:
  std::optional<SignalsDeferred> block_;
};

// Calls function() with signals deferred, and returns its result. If a handler raises at the end,
// throws that exception instead of returning the result or throwing function()'s exception.
py::object uninterrupted(py::handle function, bool is_patient);

// Calls the handlers of recorded signals, then function(), during which handlers run despite
// enclosing kBetween blocks. After a handler raises, further signals are deferred again.
py::object interruptible(py::handle function);

// `__enter__` and `__exit__` of a context manager that has `_enter()` and `_leave(type, error,
// traceback)`. No handler runs within either. If a handler raises at the end of `_enter()`,
// `_leave()` is called before the exception is thrown. leave_block() returns the result of
// `_leave()`, which determines whether the error is suppressed.
py::object enter_block(py::handle manager);
py::object leave_block(py::handle manager, py::handle type, py::handle error, py::handle traceback);

// Implements `__enter__` for a context manager whose `_enter(place)` takes a long time, so that
// handlers may interrupt it. `_enter` appends each entered object to the list `place`; if it
// raises, `_undo(place, error)` is called with signals deferred.
py::object enter_interruptibly(py::handle manager);

}  // namespace memsaver::python
