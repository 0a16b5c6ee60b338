// signals: deferral of Python's signal handlers, for calls that must not be interrupted halfway.
//
// Python calls a signal's handler on its main thread, between any two instructions of Python code,
// and an exception of a handler leaves that code half done. While a SignalsDeferred exists, each
// Python handler is replaced by one that only records the signal. The rules:
//
// - The handlers are called when the outermost block that defers signals ends; or before, in work
//   that a kOpen block inside kBetween blocks opens to handlers.
// - A signal that comes several times is handled once, as one that a process blocks. Otherwise
//   handlers that begin transitions, during which more signals come, would multiply.
// - If several handlers raise at the end, the first exception counts.
// - A handler that a program sets in a block stays.
// - Blocks nest, whatever their kinds, and may end in any order. A block that is destroyed without
//   its finish() defers nothing more; the handlers of recorded signals are called soon after.
// - Blocks concern the main thread. On other threads, which run no handlers, they do nothing; in a
//   forked child they are over.
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
  kWhole,       // until the end, or until a wait for a tag, which a handler that raises ends
  kPatient,     // until the end, also while the block waits for a tag
  kInterrupts,  // as kPatient, but SIGINT alone
  kBetween,     // as kPatient, except in a kOpen inside
  kOpen,        // handlers run in spite of the kBetween blocks around; no effect on other kinds
};

class SignalsDeferred {
 public:
  // Throws the exception of a handler that runs before the deferral begins or, if kOpen, of a
  // handler of a recorded signal. If kPatient, finish() returns it instead.
  explicit SignalsDeferred(Deferral kind);
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;

  // Ends the block. Calls the handlers of the recorded signals, unless a block around defers them,
  // and returns their exception.
  Raised finish();

  // Calls the handlers of the recorded signals while a call waits for a tag, if every block allows
  // that. Returns false, with Python's error set, if one raised.
  static bool deliver_in_wait();

  // Restores the handlers in a forked child, whose main thread may be another, and drops signals.
  static void forget();

 private:
  struct Replaced {
    int number;
    py::object handler;
    struct sigaction action;
    py::object before;  // what `last_` had for the signal
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
  // Whether a signal waits now, or would if the main thread waited for a tag.
  static bool defers(int number, bool in_wait);
  // Adds a signal to `came_`, unless it is there.
  static void keep_waiting(Signal signal);
  // The signals that came and need not wait, taken out of `came_`.
  static std::vector<Signal> take_due(bool in_wait);
  // Calls their handlers.
  static void deliver(Raised& raised, bool in_wait);
  static PyObject* call(const py::object& handler, const Signal& signal);

  void replace();
  void begin();
  void restore();
  bool end();  // false if it had no effect, or has ended

  const Deferral kind_;
  bool is_active_ = false;  // it is in `blocks_`; never on another thread than the main one
  bool is_shut_ = false;    // kOpen: a handler runs, or has raised; further signals wait
  std::vector<Replaced> replaced_;
  Raised raised_;

  // Of the main thread, under the GIL.
  static inline unsigned long main_ = 0;  // the thread, while there are blocks
  static inline auto* blocks_ = new std::vector<SignalsDeferred*>;  // innermost last
  static inline auto* came_ = new std::vector<Signal>;
  static inline auto* last_ = new std::map<int, py::object>;  // the handlers behind noter()
};

// The same as a context manager of Python's, in whose methods no signal's handler can come.
class DeferredBlock {
 public:
  explicit DeferredBlock(bool interrupts_alone)
      : kind_(interrupts_alone ? Deferral::kInterrupts : Deferral::kBetween) {}
  void enter() { block_.emplace(kind_); }
  void leave();

 private:
  const Deferral kind_;
  std::optional<SignalsDeferred> block_;
};

// Calls function() with signals deferred, and returns its result. If a handler raises at the end,
// throws that exception instead of returning the result or throwing function()'s exception.
py::object uninterrupted(py::handle function, bool is_patient);

// Calls function() with handlers running in spite of the kBetween blocks around, first those of
// signals that came. After an exception out of a handler they are deferred again.
py::object interruptible(py::handle function);

// `__enter__` and `__exit__` of a context manager that has `_enter()` and `_leave(type, error,
// traceback)`. No handler runs within either. If a handler raises at the end of `_enter()`,
// `_leave()` is called before the exception is thrown. leave_block() returns the result of
// `_leave()`, which says whether the error is suppressed.
py::object enter_block(py::handle manager);
py::object leave_block(py::handle manager, py::handle type, py::handle error, py::handle traceback);

// `__enter__` of a context manager whose `_enter(place)` takes long and so may be interrupted by
// handlers. `_enter` appends to the list `place` what it has entered; if it raises,
// `_undo(place, error)` is called with signals deferred.
py::object enter_interruptibly(py::handle manager);

}  // namespace memsaver::python
