#include "python/signals.h"

#include <algorithm>
#include <iterator>

#include "python/calls.h"

namespace memsaver::python {
namespace {

constexpr int kMostTries = 1000;  // each failed try means that a handler of a new signal raised

void keep(Raised& raised) {
  py::error_already_set error;  // takes Python's current error
  if (!raised) raised.emplace(error);
}

// Throws `later`, with `earlier` as its context.
[[noreturn]] void raise(const py::error_already_set& later, const Raised& earlier) {
  if (earlier && !earlier->value().is(later.value())) {
    PyObject* const context = PyException_GetContext(later.value().ptr());
    Py_XDECREF(context);
    if (!context) PyException_SetContext(later.value().ptr(), earlier->value().inc_ref().ptr());
  }
  throw later;
}

PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

// Returns the result of a call, or null, with the error in `failure`, if the call raised.
py::object result_of(PyObject* result, Raised& failure) {
  if (!result) keep(failure);
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

bool SignalsDeferred::defers(bool in_wait) {
  bool is_open = false;
  for (auto block = blocks_->rbegin(); block != blocks_->rend(); ++block) {
    switch ((*block)->kind_) {
      case Deferral::kOpen:
        is_open = is_open || !(*block)->is_shut_;
        break;
      case Deferral::kBetween:
        if (!is_open) return true;
        break;
      case Deferral::kWhole:
        if (!in_wait) return true;
        break;
      case Deferral::kPatient:
        return true;
    }
  }
  return false;
}

PyObject* SignalsDeferred::note(PyObject*, PyObject* args) {
  int number = 0;
  PyObject* frame = nullptr;
  if (!PyArg_ParseTuple(args, "iO", &number, &frame)) return nullptr;
  try {
    Signal signal{number, py::reinterpret_borrow<py::object>(frame)};
    if (defers(false)) {
      keep_waiting(std::move(signal));
      Py_RETURN_NONE;
    }
    // Called in work that is open to handlers, or if code in a block has read this handler and set
    // it later.
    const auto last = last_->find(number);
    if (last == last_->end() || !last->second) Py_RETURN_NONE;
    PyObject* const result = call(py::object(last->second), signal);
    Raised raised;
    if (result) deliver(raised, false);  // signals that arrived while the handler ran
    if (!raised) return result;
    Py_DECREF(result);
    raised->restore();
    return nullptr;
  } catch (...) {
    return PyErr_NoMemory();
  }
}

// In open work, signals wait while a handler runs and after a handler has raised, because a second
// exception could arrive where no code catches it.
PyObject* SignalsDeferred::call(const py::object& handler, const Signal& signal) {
  const auto is_open = [](const SignalsDeferred* block) {
    return block->kind_ == Deferral::kOpen && !block->is_shut_;
  };
  const auto found = std::find_if(blocks_->rbegin(), blocks_->rend(), is_open);
  SignalsDeferred* const open = found == blocks_->rend() ? nullptr : *found;
  if (open) open->is_shut_ = true;
  PyObject* const result =
      PyObject_CallFunction(handler.ptr(), "iO", signal.number, signal.frame.ptr());
  if (result && std::find(blocks_->begin(), blocks_->end(), open) != blocks_->end()) {
    open->is_shut_ = false;
  }
  return result;
}

const py::object& SignalsDeferred::noter() {
  static PyMethodDef definition = {"note_signal", &SignalsDeferred::note, METH_VARARGS,
                                   "Record a signal, so that its handler is called later."};
  static const auto* const made = new py::object(
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, nullptr, nullptr)));
  return *made;
}

bool SignalsDeferred::set_handler(int number, const py::object& handler,
                                  const struct sigaction& action, Raised& raised, bool insist) {
  static const auto* const set = new py::object(signal_module().attr("signal"));
  for (int tries = 0; tries < kMostTries; ++tries) {
    PyObject* const before = PyObject_CallFunction(set->ptr(), "iO", number, handler.ptr());
    if (before) {
      Py_DECREF(before);
      sigaction(number, &action, nullptr);  // keeps the flags that signal.siginterrupt set
      return true;
    }
    if (PyErr_ExceptionMatches(PyExc_ValueError)) {  // not the main thread
      PyErr_Clear();
      return false;
    }
    keep(raised);  // a pending handler ran first, and raised
    if (!insist) return false;
  }
  return false;
}

SignalsDeferred::SignalsDeferred(Deferral kind) : kind_(kind) {
  const bool is_nested = !blocks_->empty();
  if (is_nested && main_ != PyThread_get_thread_ident()) return;
  if (kind == Deferral::kOpen) {
    if (!is_nested) return;
    begin();
    deliver(raised_, false);
  } else {
    const bool is_deferred = defers(false);
    if (is_nested) begin();
    if (!is_deferred) replace();
  }
  if (!raised_ || kind == Deferral::kPatient) return;
  end();
  throw py::error_already_set(*raised_);
}

SignalsDeferred::~SignalsDeferred() {
  if (!end()) return;
  for (const Signal& one : take_due(false)) PyErr_SetInterruptEx(one.number);
}

void SignalsDeferred::replace() {
  static const auto* const get = new py::object(signal_module().attr("getsignal"));
  const bool is_outermost = blocks_->empty();
  for (int number = 1; number < NSIG; ++number) {
    PyObject* const found = PyObject_CallFunction(get->ptr(), "i", number);
    if (!found) {
      PyErr_Clear();  // there is no signal with this number
      continue;
    }
    auto handler = py::reinterpret_steal<py::object>(found);
    if (!PyCallable_Check(handler.ptr())) continue;
    py::object& last = (*last_)[number];
    // Set by an enclosing block, or left by a block that ended on another thread.
    if (handler.is(noter())) {
      if (!is_outermost || !last) continue;
      handler = last;
    }
    Replaced replaced{number, handler, {}, last};
    sigaction(number, nullptr, &replaced.action);
    if (!set_handler(number, noter(), replaced.action, raised_, kind_ == Deferral::kPatient)) {
      return;  // not the main thread, or a handler raised
    }
    last = std::move(handler);
    replaced_.push_back(std::move(replaced));
    if (!blocks_->empty()) continue;
    begin();
    main_ = PyThread_get_thread_ident();
  }
}

void SignalsDeferred::begin() {
  blocks_->push_back(this);
  is_active_ = true;
}

void SignalsDeferred::restore() {
  static const auto* const get = new py::object(signal_module().attr("getsignal"));
  const std::vector<Replaced> all = std::move(replaced_);
  replaced_.clear();
  for (const Replaced& one : all) {
    PyObject* const now = PyObject_CallFunction(get->ptr(), "i", one.number);
    if (!now) PyErr_Clear();
    if (now == noter().ptr()) set_handler(one.number, one.handler, one.action, raised_, true);
    Py_XDECREF(now);
    if (blocks_->size() > 1 && one.before) (*last_)[one.number] = one.before;
  }
}

bool SignalsDeferred::end() {
  if (!is_active_) return false;
  is_active_ = false;
  const auto found = std::find(blocks_->begin(), blocks_->end(), this);
  if (found + 1 == blocks_->end()) {
    restore();  // may call handlers, and so change `blocks_`
  } else {      // an inner block continues
    std::vector<Replaced>& inside = (*(found + 1))->replaced_;
    inside.insert(inside.end(), std::make_move_iterator(replaced_.begin()),
                  std::make_move_iterator(replaced_.end()));
    replaced_.clear();
  }
  // The entry is missing in a child that a handler has forked.
  blocks_->erase(std::remove(blocks_->begin(), blocks_->end(), this), blocks_->end());
  return true;
}

void SignalsDeferred::keep_waiting(Signal signal) {
  for (const Signal& one : *came_) {
    if (one.number == signal.number) return;
  }
  came_->push_back(std::move(signal));
}

std::vector<SignalsDeferred::Signal> SignalsDeferred::take_due(bool in_wait) {
  return defers(in_wait) ? std::vector<Signal>() : std::exchange(*came_, {});
}

void SignalsDeferred::deliver(Raised& raised, bool in_wait) {
  static const auto* const get = new py::object(signal_module().attr("getsignal"));
  const std::vector<Signal> due = take_due(in_wait);
  for (auto one = due.begin(); one != due.end(); ++one) {
    if (defers(in_wait)) {  // a handler has raised in open work
      keep_waiting(*one);
      continue;
    }
    auto handler =
        py::reinterpret_steal<py::object>(PyObject_CallFunction(get->ptr(), "i", one->number));
    if (handler && handler.is(noter())) handler = (*last_)[one->number];
    if (!handler || !PyCallable_Check(handler.ptr())) {
      PyErr_Clear();
      continue;
    }
    PyObject* const result = call(handler, *one);
    if (!result) keep(raised);
    Py_XDECREF(result);
  }
}

Raised SignalsDeferred::finish() {
  if (end()) deliver(raised_, false);
  return std::move(raised_);
}

bool SignalsDeferred::deliver_in_wait() {
  if (blocks_->empty() || main_ != PyThread_get_thread_ident()) return true;
  Raised raised;
  deliver(raised, true);
  if (raised) raised->restore();
  return !raised;
}

void SignalsDeferred::forget() {
  came_->clear();
  const std::vector<SignalsDeferred*> blocks = std::move(*blocks_);
  blocks_->clear();
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    (*block)->is_active_ = false;
    (*block)->restore();
  }
}

void DeferredBlock::leave() {
  if (!block_) return;
  const Raised raised = block_->finish();
  block_.reset();
  if (raised) throw py::error_already_set(*raised);
}

// In the five functions below, no owner of a Python object is alive during a call into Python,
// because interpreter exit ends daemon threads in such a call by unwinding their stacks.

namespace {

py::object call_with(Deferral kind, py::handle function) {
  SignalsDeferred deferred(kind);
  Raised failure;
  py::object result = result_of(PyObject_CallNoArgs(function.ptr()), failure);
  if (const Raised raised = deferred.finish()) raise(*raised, failure);
  if (failure) throw py::error_already_set(*failure);
  return result;
}

}  // namespace

py::object uninterrupted(py::handle function, bool is_patient) {
  return call_with(is_patient ? Deferral::kPatient : Deferral::kWhole, function);
}

py::object interruptible(py::handle function) { return call_with(Deferral::kOpen, function); }

py::object enter_block(py::handle manager) {
  static PyObject* const begin = name_of("_enter");
  static PyObject* const leave = name_of("_leave");
  Raised failure;
  py::object value;
  Raised raised;
  {
    SignalsDeferred deferred(Deferral::kWhole);
    value = result_of(PyObject_CallMethodObjArgs(manager.ptr(), begin, nullptr), failure);
    raised = deferred.finish();
  }
  if (!raised) {
    if (failure) throw py::error_already_set(*failure);
    return value;
  }
  if (!failure) {  // handlers raise only on the main thread
    SignalsDeferred deferred(Deferral::kPatient);
    const py::object trace = raised->trace() ? py::object(raised->trace()) : py::none();
    result_of(PyObject_CallMethodObjArgs(manager.ptr(), leave, raised->type().ptr(),
                                         raised->value().ptr(), trace.ptr(), nullptr),
              failure);
    deferred.finish();  // ignores later errors: the first signal's error is raised below
  }
  raise(*raised, failure);
}

py::object leave_block(py::handle manager, py::handle type, py::handle error,
                       py::handle traceback) {
  static PyObject* const leave = name_of("_leave");
  SignalsDeferred deferred(Deferral::kPatient);
  Raised failure;
  py::object result = result_of(PyObject_CallMethodObjArgs(manager.ptr(), leave, type.ptr(),
                                                           error.ptr(), traceback.ptr(), nullptr),
                                failure);
  if (const Raised raised = deferred.finish()) raise(*raised, failure);
  if (failure) throw py::error_already_set(*failure);
  return result;
}

py::object enter_interruptibly(py::handle manager) {
  static PyObject* const begin = name_of("_enter");
  static PyObject* const undo = name_of("_undo");
  PyObject* const place = PyList_New(0);
  if (!place) throw py::error_already_set();
  Raised failure;
  py::object value =
      result_of(PyObject_CallMethodObjArgs(manager.ptr(), begin, place, nullptr), failure);
  const py::object entered = py::reinterpret_steal<py::object>(place);
  if (!failure) return value;
  SignalsDeferred deferred(Deferral::kPatient);
  Raised second;
  result_of(PyObject_CallMethodObjArgs(manager.ptr(), undo, place, failure->value().ptr(), nullptr),
            second);
  if (const Raised raised = deferred.finish()) raise(*raised, failure);
  if (second) raise(*second, failure);
  throw py::error_already_set(*failure);
}

}  // namespace memsaver::python
