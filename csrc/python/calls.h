// calls: the C ABI called from Python: without the GIL, failures as exceptions, lists as lists.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

#include "memsaver.h"

namespace memsaver::python {

namespace py = pybind11;

// No GIL for its life. As pybind11's gil_scoped_release, but at the interpreter's exit Python ends
// a daemon's thread where it takes the GIL again, by unwinding its stack, which must be let
// through.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(false) { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Text of the library's, in which a path or a variable may have brought bytes that are no UTF-8.
inline py::str text_of(const char* text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text, static_cast<py::ssize_t>(std::strlen(text)), "backslashreplace");
  if (!decoded) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

// The function of memsaver.errors that makes exceptions. Looked up when the module is loaded: in
// finalizers at the interpreter's end nothing can be imported any more. Never released.
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

// Makes the call without the GIL, then raises what it reported. The call gets the ms_error to fill.
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

template <typename Row, typename Convert>
inline py::list list_of(Row* rows, size_t count, Convert convert) {
  py::list list;
  for (size_t i = 0; i < count; ++i) list.append(convert(rows[i]));
  ms_list_free(rows);
  return list;
}

inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace memsaver::python
