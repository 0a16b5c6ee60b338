// signals: defers Python's signal handlers during calls that must not be interrupted halfway.
//
// Python calls a signal's handler on the main thread, between any two instructions of Python code.
// If the handler raises an exception, that code is not completed. While a SignalsDeferred exists,
// each Python handler is replaced by a handler that only records the signal. These rules apply:
//
// - The handlers are called at the end of the outermost block that defers signals, or earlier in a
//   kOpen block that is nested in kBetween blocks.
// - A signal that arrives several times is handled only once, like a signal that a process blocks.
//   Otherwise, if handlers began transitions during which more signals arrived, the handler calls
//   would multiply.
// - If several handlers raise at the end, only the first exception is raised.
// - A handler that a program sets in a block stays set after the block.
// - Blocks of all kinds nest, and may end in any order. A block that is destroyed without
//   finish() no longer defers signals; the handlers of signals that were recorded are called soon
//   afterwards.
// - Blocks affect only the main thread. On other threads, which run no handlers, blocks do nothing.
//   In a forked child, all blocks have ended.
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
  kWhole,    // defers until the end or a wait for a tag; a handler's exception ends the wait
  kPatient,  // defers until the end, even while the block waits for a tag
  kBetween,  // like kPatient, except inside a nested kOpen block
  kOpen,     // handlers run despite enclosing kBetween blocks; no effect on other kinds
};

class SignalsDeferred {
 public:
  // Throws the exception of a handler that runs before the deferral begins. If the kind is kOpen,
  // also throws the exception of a recorded signal's handler. If the kind is kPatient, finish()
  // returns the exception instead.
  explicit SignalsDeferred(Deferral kind);
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;

  // Ends the block. Calls the handlers of the recorded signals, unless an enclosing block defers
  // these signals, and returns the handlers' exception.
  Raised finish();

  // Calls the handlers of the recorded signals while a call waits for a tag, if every block allows
  // handlers during waits. Returns false, with Python's error set, if a handler raised.
  static bool deliver_in_wait();

  // Restores the handlers in a forked child, whose main thread may be a different thread, and
  // discards the recorded signals.
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
  // Sets a handler. Returns false on a thread that may not set handlers. Unless `insist` is true,
  // also returns false if a pending handler raised an exception.
  static bool set_handler(int number, const py::object& handler, const struct sigaction& action,
                          Raised& raised, bool insist);
  // Returns whether signals are deferred now, or would be if the main thread waited for a tag.
  static bool defers(bool in_wait);
  // Adds a signal to `came_`, unless the list already contains it.
  static void keep_waiting(Signal signal);
  // Removes the signals that are not deferred from `came_` and returns them.
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

// A Python context manager for a SignalsDeferred. No handler runs in its methods.
class DeferredBlock {
 public:
  void enter() { block_.emplace(Deferral::kBetween); }
  void leave();

 private:
  std::optional<SignalsDeferred> block_;
};

// Calls function() with signals deferred, and returns the result. If a handler raises an exception
// at the end, throws that exception instead of returning the result or throwing function()'s
// exception.
py::object uninterrupted(py::handle function, bool is_patient);

// Calls the handlers of recorded signals, and then calls function(), during which handlers run
// despite enclosing kBetween blocks. After a handler raises an exception, further signals are
// deferred again.
py::object interruptible(py::handle function);

// These functions implement `__enter__` and `__exit__` for a context manager that has `_enter()`
// and `_leave(type, error, traceback)`. No handler runs during either function. If a handler raises
// an exception at the end of `_enter()`, `_leave()` is called before the exception is thrown.
// leave_block() returns the result of `_leave()`, which determines whether the error is suppressed.
py::object enter_block(py::handle manager);
py::object leave_block(py::handle manager, py::handle type, py::handle error, py::handle traceback);

// Implements `__enter__` for a context manager whose `_enter(place)` takes a long time. Handlers
// may interrupt `_enter`. `_enter` appends each entered object to the list `place`. If `_enter`
// raises an exception, `_undo(place, error)` is called with signals deferred.
py::object enter_interruptibly(py::handle manager);

}  // namespace memsaver::python
