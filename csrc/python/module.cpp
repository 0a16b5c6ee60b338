// module: memsaver._C, the C ABI with Python's types. It only converts arguments and results; all
// decisions are made in Python.
//
// Every call that can wait releases the GIL. A failure becomes the exception that
// memsaver.errors.error_of builds.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "memsaver.h"
#include "python/calls.h"
#include "python/inspection.h"
#include "python/reservation.h"
#include "python/sharing.h"
#include "python/signals.h"
#include "python/transition.h"

namespace memsaver::python {
namespace {

// Throws unless the process's libmemsaver.so, the first that was loaded, is this package's. A
// preloaded library may belong to another installation.
void require_own_core() {
  if (std::string(ms_version()) == MEMSAVER_VERSION) return;
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&ms_version), &info);
  throw py::import_error(std::string("this package is memsaver " MEMSAVER_VERSION
                                     ", and the process has libmemsaver.so of memsaver ") +
                         ms_version() + " from " +
                         (info.dli_fname ? info.dli_fname : "another place") +
                         ": use one installation, and take the other's library out of LD_PRELOAD");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "memsaver's C ABI. Private: use the package memsaver.";
  require_own_core();
  find_errors();

  m.def("uninterrupted", &uninterrupted, py::arg("function"), py::arg("is_patient") = false);
  m.def("interruptible", &interruptible, py::arg("function"));
  py::class_<DeferredBlock>(m, "SignalsDeferred")
      .def(py::init<>())
      .def("__enter__", &DeferredBlock::enter)
      .def("__exit__",
           [](DeferredBlock& self, py::handle, py::handle, py::handle) { self.leave(); });
  // Native methods have no Python frame in which a signal handler could interrupt them.
  const auto method = [&m](const char* name, const py::object& function) {
    m.attr(name) = py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
  };
  method("enter", py::cpp_function(&enter_block));
  method("enter_interruptibly", py::cpp_function(&enter_interruptibly));
  method("exit", py::cpp_function(&leave_block));
  py::module_::import("os").attr("register_at_fork")(
      py::arg("after_in_child") = py::cpp_function(&SignalsDeferred::forget));

  // Python's cyclic garbage collector is off while there are more pause_collection() calls than
  // resume_collection() calls, counted over all threads. Both run under the GIL.
  static int collection_pauses = 0;
  static bool is_collection_wanted = false;
  m.def("pause_collection", [] {
    if (collection_pauses++ == 0) is_collection_wanted = PyGC_Disable() != 0;
  });
  m.def("resume_collection", [] {
    if (collection_pauses > 0 && --collection_pauses == 0 && is_collection_wanted) PyGC_Enable();
  });
  // In a forked child, the threads that would call resume_collection() do not exist.
  py::module_::import("os").attr("register_at_fork")(
      py::arg("after_in_child") = py::cpp_function([] {
        if (collection_pauses > 0 && is_collection_wanted) PyGC_Enable();
        collection_pauses = 0;
      }));
  // Empties a frame's copy of its variables (`f_locals`, before Python 3.13) if no program refers
  // to it. A trace function that is running on the frame's thread, such as a debugger's, prevents
  // that: after its call, the variables get the values of the copy. The GIL is held throughout.
  m.def("empty_copy_of_variables", [](unsigned long ident, py::handle frame) {
    const py::object copy = frame.attr("f_locals");
    PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (thread && thread->thread_id != ident) thread = PyThreadState_Next(thread);
    const bool is_tracing = thread && thread->tracing > 0;
    constexpr Py_ssize_t kOwn = 2;  // the references from the frame and from here
    if (!is_tracing && Py_REFCNT(copy.ptr()) == kOwn) PyDict_Clear(copy.ptr());
  });
  m.def("version", &ms_version);
  m.def("driver_info", [] {
    int version = 0, simulated = 0;
    const char* library = "";
    without_gil(
        [&](ms_error* error) { return ms_driver_info(&version, &library, &simulated, error); });
    return py::make_tuple(version, library, simulated != 0);
  });
  m.def("device_count", [] {
    int count = 0;
    without_gil([&](ms_error* error) { return ms_device_count(&count, error); });
    return count;
  });
  m.def(
      "device_memory",
      [](int device) {
        uint64_t free_bytes = 0, total_bytes = 0;
        without_gil([&](ms_error* error) {
          return ms_device_memory(device, &free_bytes, &total_bytes, error);
        });
        return py::make_tuple(free_bytes, total_bytes);
      },
      py::arg("device"));
  m.def("device_bus_id", [](int device) {
    char text[64] = {};
    without_gil(
        [&](ms_error* error) { return ms_device_bus_id(device, text, sizeof(text), error); });
    return text_of(text);
  });
  m.def("configure", [](const std::string& name, const std::string& value) {
    without_gil([&](ms_error* error) { return ms_configure(name.c_str(), value.c_str(), error); });
  });
  m.def("check_option", [](const std::string& name, const std::string& value) {
    without_gil(
        [&](ms_error* error) { return ms_check_option(name.c_str(), value.c_str(), error); });
  });
  m.def("option", [](const std::string& name) {
    char value[4096];  // PATH_MAX: an option may be a path
    without_gil(
        [&](ms_error* error) { return ms_option(name.c_str(), value, sizeof(value), error); });
    return py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefault(value));
  });
  m.def("next_warning", []() -> py::object {
    char text[2048];
    if (!ms_next_warning(text, sizeof(text))) return py::none();
    return text_of(text);
  });

  m.def("region_enter", [](const std::string& tag, int backup) {
    interruptibly([&](ms_error* error) { return ms_region_enter(tag.c_str(), backup, error); });
  });
  m.def("region_limit", [](uint64_t devices) {
    without_gil([&](ms_error* error) { return ms_region_limit(devices, error); });
  });
  m.def("refresh_peers",
        [] { interruptibly([](ms_error* error) { return ms_refresh_peers(error); }); });
  m.def("region_exit", [] { without_gil([](ms_error* error) { return ms_region_exit(error); }); });
  m.def("disable_enter",
        [] { without_gil([](ms_error* error) { return ms_disable_enter(error); }); });
  m.def("region_tag", []() -> py::object {
    const char* tag = ms_region_tag();
    if (!tag) return py::none();
    return text_of(tag);
  });
  m.def("region_depth", &ms_region_depth);
  m.def("stream_bind", [](uint64_t stream, const std::string& tag, int backup) {
    interruptibly([&](ms_error* error) {
      return ms_stream_bind(pointer(stream), tag.c_str(), backup, error);
    });
  });
  m.def("stream_unbind", [](uint64_t stream) {
    without_gil([&](ms_error* error) { return ms_stream_unbind(pointer(stream), error); });
  });

  m.def(
      "malloc",
      [](uint64_t bytes, int device) {
        void* allocated = nullptr;
        interruptibly([&](ms_error* error) { return ms_malloc(bytes, device, &allocated, error); });
        return reinterpret_cast<uint64_t>(allocated);
      },
      py::arg("bytes"), py::arg("device") = -1);
  m.def("free", [](uint64_t address) {
    without_gil([&](ms_error* error) { return ms_free(pointer(address), error); });
  });
  // Returns the addresses of the two functions that torch needs from an allocator.
  m.def("torch_allocator", [](const std::string& tag, int backup) {
    ms_torch_malloc_function function = nullptr;
    without_gil(
        [&](ms_error* error) { return ms_torch_malloc_of(tag.c_str(), backup, &function, error); });
    return py::make_tuple(reinterpret_cast<uint64_t>(function),
                          reinterpret_cast<uint64_t>(&ms_torch_free));
  });
  m.def("owns", [](uint64_t address) { return ms_owns(pointer(address)) != 0; });

  m.def("changes", &ms_changes);
  py::class_<Reservation>(m, "Reservation")
      .def(py::init<std::vector<std::string>, double>(), py::arg("tags"), py::arg("seconds") = -1.0)
      .def("__enter__", [](Reservation& self) { self.take(); })
      .def("__exit__",
           [](Reservation& self, py::handle, py::handle, py::handle) { self.release(); })
      .def("take", &Reservation::take)
      .def("release", &Reservation::release)
      .def("hand_over", &Reservation::hand_over)
      .def("take_over", &Reservation::take_over)
      .def("wait", &Reservation::wait, py::arg("seconds"));
  py::class_<Transition>(m, "Transition")
      .def("run", &Transition::run)
      .def_static("run_all", &Transition::run_all, py::arg("transitions"))
      .def("set_caller", &Transition::set_caller, py::arg("caller"))
      .def("progress", &Transition::progress)
      .def("wait_stream", &Transition::wait_stream, py::arg("stream"))
      .def("wait_ranges", &Transition::wait_ranges, py::arg("ranges"), py::arg("stream"))
      .def("give_up", &Transition::give_up);
  m.def(
      "begin",
      [](const std::vector<std::string>& out, const std::vector<std::string>& into, int backup,
         const std::vector<Pair>& unowned, std::optional<uint64_t> changes) {
        const std::vector<const char*> going = pointers(out), coming = pointers(into);
        const std::vector<ms_range> ranges = ranges_of(unowned);
        return begun([&](ms_transition** transition, ms_error* error) {
          return ms_transition_begin(going.data(), going.size(), coming.data(), coming.size(),
                                     backup, ranges.data(), ranges.size(),
                                     changes ? &*changes : nullptr, transition, error);
        });
      },
      py::arg("out"), py::arg("into"), py::arg("backup"), py::arg("unowned"),
      py::arg("changes") = py::none());
  m.def("tag_state", [](const std::string& tag) {
    int state = 0;
    without_gil([&](ms_error* error) { return ms_tag_state(tag.c_str(), &state, error); });
    return state;
  });
  m.def("tag_pausable", [](const std::string& tag) {
    int pausable = 0;
    without_gil([&](ms_error* error) { return ms_tag_pausable(tag.c_str(), &pausable, error); });
    return pausable != 0;
  });
  // Returns None if no region has ever named the tag. The first region of each tag calls this, and
  // an error would compare its name with all other tags' names.
  m.def("tag_backup", [](const std::string& tag) {
    std::optional<int> backup = 0;
    without_gil([&](ms_error* error) {
      const ms_status status = ms_tag_backup(tag.c_str(), &*backup, error);
      if (status != MS_UNKNOWN_TAG) return status;
      backup.reset();
      return MS_OK;
    });
    return backup;
  });
  // The memoryview is always writable: a caller that requested read access must not write.
  m.def(
      "backup_view",
      [](uint64_t address, uint64_t bytes, bool writable, bool retained) {
        void* host = nullptr;
        interruptibly([&](ms_error* error) {
          return (retained ? ms_retained_view : ms_backup_view)(address, bytes, writable, &host,
                                                                error);
        });
        return py::memoryview::from_memory(host, static_cast<py::ssize_t>(bytes));
      },
      py::arg("address"), py::arg("bytes"), py::arg("writable") = false,
      py::arg("retained") = false);
  define_inspection(m);
  define_sharing(m);
  m.def("trim", [] {
    uint64_t released = 0;
    without_gil([&](ms_error* error) { return ms_trim(&released, error); });
    return released;
  });
  m.def("trim_tags", [](const std::vector<std::string>& tags) {
    const std::vector<const char*> names = pointers(tags);
    uint64_t released = 0;
    without_gil([&](ms_error* error) {
      return ms_trim_tags(names.data(), names.size(), &released, error);
    });
    return released;
  });
}

}  // namespace memsaver::python
