#include "python/signals.h"

#include <algorithm>

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

// Returns the result of a call; null, with the error in `failure`, if it raised.
py::object result_of(PyObject* result, Raised& failure) {
  if (!result) keep(failure);
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

PyObject* SignalsDeferred::note(PyObject*, PyObject* args) {
  int number = 0;
  PyObject* frame = nullptr;
  if (!PyArg_ParseTuple(args, "iO", &number, &frame)) return nullptr;
  try {
    if (deferring_) {
      const auto has_number = [number](const Signal& one) { return one.number == number; };
      if (std::none_of(came_->begin(), came_->end(), has_number)) {
        came_->push_back({number, py::reinterpret_borrow<py::object>(frame)});
      }
      Py_RETURN_NONE;
    }
  } catch (...) {
    return PyErr_NoMemory();
  }
  // A program read this handler during a deferral and installed it again afterwards.
  const auto last = last_->find(number);
  if (last == last_->end()) Py_RETURN_NONE;
  return PyObject_CallFunction(last->second.ptr(), "iO", number, frame);
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

SignalsDeferred::SignalsDeferred(bool is_patient) {
  if (deferring_) {
    is_nested_ = main_ == PyThread_get_thread_ident();
    if (is_nested_) {
      was_patient_ = patient_;
      patient_ = patient_ || is_patient;
    }
    return;
  }
  static const auto* const get = new py::object(signal_module().attr("getsignal"));
  for (int number = 1; number < NSIG; ++number) {
    PyObject* const found = PyObject_CallFunction(get->ptr(), "i", number);
    if (!found) {
      PyErr_Clear();  // there is no signal with this number
      continue;
    }
    auto handler = py::reinterpret_steal<py::object>(found);
    if (!PyCallable_Check(handler.ptr()) || handler.is(noter())) continue;
    Replaced replaced{number, handler, {}};
    sigaction(number, nullptr, &replaced.action);
    if (!set_handler(number, noter(), replaced.action, raised_, is_patient)) {
      if (!raised_) return;  // not the main thread
      restore();
      throw py::error_already_set(*raised_);
    }
    (*last_)[number] = handler;
    replaced_->push_back(std::move(replaced));
    is_active_ = true;
    deferring_ = true;
    main_ = PyThread_get_thread_ident();
  }
  if (is_active_) patient_ = is_patient;
}

SignalsDeferred::~SignalsDeferred() {
  if (is_nested_) patient_ = was_patient_;
  if (is_active_) restore();
}

void SignalsDeferred::restore() {
  if (!is_active_) return;
  is_active_ = false;
  static const auto* const get = new py::object(signal_module().attr("getsignal"));
  const std::vector<Replaced> all = std::move(*replaced_);
  replaced_->clear();
  for (const Replaced& one : all) {
    PyObject* const now = PyObject_CallFunction(get->ptr(), "i", one.number);
    if (!now) PyErr_Clear();
    if (now == noter().ptr()) set_handler(one.number, one.handler, one.action, raised_, true);
    Py_XDECREF(now);
  }
  deferring_ = patient_ = false;
}

void SignalsDeferred::deliver(std::vector<Signal> came, Raised& raised) {
  static const auto* const get = new py::object(signal_module().attr("getsignal"));
  for (const Signal& one : came) {
    auto handler =
        py::reinterpret_steal<py::object>(PyObject_CallFunction(get->ptr(), "i", one.number));
    if (handler && handler.is(noter())) handler = (*last_)[one.number];
    if (!handler || !PyCallable_Check(handler.ptr())) {
      PyErr_Clear();
      continue;
    }
    PyObject* const result =
        PyObject_CallFunction(handler.ptr(), "iO", one.number, one.frame.ptr());
    if (!result) keep(raised);
    Py_XDECREF(result);
  }
}

Raised SignalsDeferred::finish() {
  if (!is_active_) return std::move(raised_);
  restore();
  std::vector<Signal> came;
  came.swap(*came_);
  deliver(std::move(came), raised_);
  return std::move(raised_);
}

bool SignalsDeferred::deliver_in_wait() {
  const bool mine = deferring_ && main_ == PyThread_get_thread_ident();
  if (!mine || patient_ || came_->empty()) return true;
  std::vector<Signal> came;
  came.swap(*came_);
  Raised raised;
  deliver(std::move(came), raised);
  if (raised) raised->restore();
  return !raised;
}

void SignalsDeferred::forget() {
  came_->clear();
  if (!deferring_) return;
  deferring_ = patient_ = false;
  Raised ignored;
  const std::vector<Replaced> all = std::move(*replaced_);
  replaced_->clear();
  for (const Replaced& one : all) set_handler(one.number, one.handler, one.action, ignored, true);
}

// In the four functions below no owner of a Python object is alive during a call into Python,
// because interpreter exit ends daemon threads in such a call by unwinding their stacks.

py::object uninterrupted(py::handle function, bool is_patient) {
  SignalsDeferred deferred(is_patient);
  Raised failure;
  py::object result = result_of(PyObject_CallNoArgs(function.ptr()), failure);
  if (const Raised raised = deferred.finish()) raise(*raised, failure);
  if (failure) throw py::error_already_set(*failure);
  return result;
}

py::object enter(py::handle manager) {
  static PyObject* const begin = name_of("_enter");
  static PyObject* const leave = name_of("_leave");
  Raised failure;
  py::object value;
  Raised raised;
  {
    SignalsDeferred deferred(false);
    value = result_of(PyObject_CallMethodObjArgs(manager.ptr(), begin, nullptr), failure);
    raised = deferred.finish();
  }
  if (!raised) {
    if (failure) throw py::error_already_set(*failure);
    return value;
  }
  if (!failure) {  // handlers raise only on the main thread
    SignalsDeferred deferred(true);
    const py::object trace = raised->trace() ? py::object(raised->trace()) : py::none();
    result_of(PyObject_CallMethodObjArgs(manager.ptr(), leave, raised->type().ptr(),
                                         raised->value().ptr(), trace.ptr(), nullptr),
              failure);
    deferred.finish();  // ignores later errors: the first signal's error is raised below
  }
  raise(*raised, failure);
}

py::object exit(py::handle manager, py::handle type, py::handle error, py::handle traceback) {
  static PyObject* const leave = name_of("_leave");
  SignalsDeferred deferred(true);
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
  SignalsDeferred deferred(true);
  Raised second;
  result_of(PyObject_CallMethodObjArgs(manager.ptr(), undo, place, failure->value().ptr(), nullptr),
            second);
  if (const Raised raised = deferred.finish()) raise(*raised, failure);
  if (second) raise(*second, failure);
  throw py::error_already_set(*failure);
}

}  // namespace memsaver::python
