// signals: Python's signal handlers deferred, to keep them from cutting what must be done as a
// whole.
//
// Python calls a signal's handler on its main thread, between any two instructions of Python code,
// and an exception out of a handler leaves that code half done. While a SignalsDeferred lives, each
// handler of Python's is replaced by one that only notes the signal. The rules:
//
// - The handlers are called when the outermost block ends that defers signals; or before, in work
//   that a kOpen inside of kBetween blocks opens to handlers.
// - A signal that comes several times is handled once, as one that a process blocks: else handlers
//   that begin transitions themselves, in which further signals come, would multiply.
// - If several handlers raise at the end, the first exception counts.
// - A handler that is set in a block stays.
// - Blocks nest, whatever their kinds, and may end in any order. A block that is destroyed without
//   its finish() defers nothing more; signals that came are handled soon after.
// - Blocks concern the main thread. On other threads, where no handler runs, they do nothing; in a
//   forked child they are over.
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

enum class Deferral {
  kWhole,       // until the end, or until a wait for a tag, which a handler that raises ends
  kPatient,     // until the end, also while the block waits for a tag
  kInterrupts,  // as kPatient, but SIGINT alone
  kBetween,     // as kPatient, except in a kOpen inside
  kOpen,        // handlers run in spite of the kBetween blocks around; no effect on other kinds
};

class SignalsDeferred {
 public:
  // Throws what a handler raises before anything is deferred, or, if kOpen, what a handler raises
  // of a signal that came before. If kPatient, finish() returns it.
  explicit SignalsDeferred(Deferral kind);
  ~SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;

  // Ends the block. Unless a block around defers them, calls the handlers of the signals that came.
  // Returns what they raised.
  Raised finish();

  // While a call waits for a tag: calls the handlers of the signals that came, if every block
  // allows it in waits. False with Python's error set if one raised.
  static bool deliver_in_wait();

  // In a forked child, whose main thread may be another: the handlers as they were.
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
  // Whether it was replaced: false on a thread that may not set handlers.
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
  void exit();

 private:
  const Deferral kind_;
  std::optional<SignalsDeferred> block_;
};

// Calls function() with signals deferred. What a handler raised at the end counts more than what
// the function raised, or gave.
py::object uninterrupted(py::handle function, bool is_patient);

// Calls function() with handlers running in spite of the kBetween blocks around, first those of
// signals that came. After an exception out of a handler they are deferred again.
py::object interruptible(py::handle function);

// `__enter__` and `__exit__` of a context manager that has `_enter()` and `_leave(type, error,
// traceback)`. Both are done as a whole; after an exception out of a handler at the end of the
// first it is left again. What `_leave` returns says whether the error is over.
py::object enter(py::handle manager);
py::object exit(py::handle manager, py::handle type, py::handle error, py::handle traceback);

// Likewise for one whose `_enter(place)` takes long, and so can be cut: `_undo(place, error)` is
// then called, as a whole, with the list that `_enter` was given to note what it has entered.
py::object enter_interruptibly(py::handle manager);

}  // namespace memsaver::python
