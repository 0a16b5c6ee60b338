// module: memsaver._C, the C ABI in Python's types. Translation only; what to call when is Python's
// affair.
//
// Every call that can wait releases the GIL. A failure becomes the exception that
// memsaver.errors.error_of builds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memsaver.h"

namespace py = pybind11;

namespace {

using Pair = std::pair<uint64_t, uint64_t>;

void check(ms_status status, const ms_error& error) {
  if (status == MS_OK) return;
  const py::str message(error.message, std::string(error.message).size());
  const py::object raised =
      py::module_::import("memsaver.errors")
          .attr("error_of")(static_cast<int>(status), message, error.cuda_error, error.call,
                            error.tag, error.needed_bytes, error.free_bytes);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  throw py::error_already_set();
}

// Makes the call without the GIL, then raises what it reported. The call gets the ms_error to fill.
template <typename Call>
void without_gil(Call call) {
  ms_error error{};
  ms_status status;
  {
    py::gil_scoped_release released;
    status = call(&error);
  }
  check(status, error);
}

template <typename Row, typename Convert>
py::list list_of(Row* rows, size_t count, Convert convert) {
  py::list list;
  for (size_t i = 0; i < count; ++i) list.append(convert(rows[i]));
  ms_list_free(rows);
  return list;
}

py::list list_of_changes(ms_change* rows, size_t count) {
  return list_of(rows, count, [](const ms_change& c) {
    return py::make_tuple(c.tag, c.device, c.changed != 0, c.device_bytes, c.copied_bytes);
  });
}

std::vector<const char*> pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> out;
  for (const std::string& text : texts) out.push_back(text.c_str());
  return out;
}

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "memsaver's C ABI. Private: use the package memsaver.";

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
  m.def("configure", [](const std::string& name, const std::string& value) {
    without_gil([&](ms_error* error) { return ms_configure(name.c_str(), value.c_str(), error); });
  });
  m.def("option", [](const std::string& name) {
    char value[64];
    without_gil(
        [&](ms_error* error) { return ms_option(name.c_str(), value, sizeof(value), error); });
    return std::string(value);
  });
  m.def("next_warning", []() -> py::object {
    char text[2048];
    if (!ms_next_warning(text, sizeof(text))) return py::none();
    return py::str(text);
  });

  m.def("region_enter", [](const std::string& tag, int backup) {
    without_gil([&](ms_error* error) { return ms_region_enter(tag.c_str(), backup, error); });
  });
  m.def("region_limit", [](uint64_t devices) {
    without_gil([&](ms_error* error) { return ms_region_limit(devices, error); });
  });
  m.def("refresh_peers",
        [] { without_gil([](ms_error* error) { return ms_refresh_peers(error); }); });
  m.def("region_exit", [] { without_gil([](ms_error* error) { return ms_region_exit(error); }); });
  m.def("disable_enter",
        [] { without_gil([](ms_error* error) { return ms_disable_enter(error); }); });
  m.def("region_tag", []() -> py::object {
    const char* tag = ms_region_tag();
    if (!tag) return py::none();
    return py::str(tag);
  });
  m.def("region_depth", &ms_region_depth);
  m.def("stream_bind", [](uint64_t stream, const std::string& tag, int backup) {
    without_gil([&](ms_error* error) {
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
        without_gil([&](ms_error* error) { return ms_malloc(bytes, device, &allocated, error); });
        return reinterpret_cast<uint64_t>(allocated);
      },
      py::arg("bytes"), py::arg("device") = -1);
  m.def("free", [](uint64_t address) {
    without_gil([&](ms_error* error) { return ms_free(pointer(address), error); });
  });
  m.def("owns", [](uint64_t address) { return ms_owns(pointer(address)) != 0; });

  m.def("changes", &ms_changes);
  m.def(
      "pause",
      [](const std::vector<std::string>& tags, int backup, const std::vector<Pair>& dead,
         std::optional<uint64_t> changes) {
        const std::vector<const char*> names = pointers(tags);
        std::vector<ms_range> unsaved;
        for (const Pair& range : dead) unsaved.push_back({range.first, range.second});
        ms_change* rows = nullptr;
        size_t count = 0;
        without_gil([&](ms_error* error) {
          return ms_pause(names.data(), names.size(), backup, unsaved.data(), unsaved.size(),
                          changes ? &*changes : nullptr, &rows, &count, error);
        });
        return list_of_changes(rows, count);
      },
      py::arg("tags"), py::arg("backup"), py::arg("dead"), py::arg("changes") = py::none());
  m.def("resume", [](const std::vector<std::string>& tags) {
    const std::vector<const char*> names = pointers(tags);
    ms_change* rows = nullptr;
    size_t count = 0;
    without_gil([&](ms_error* error) {
      return ms_resume(names.data(), names.size(), &rows, &count, error);
    });
    return list_of_changes(rows, count);
  });
  m.def("tag_state", [](const std::string& tag) {
    int state = 0;
    without_gil([&](ms_error* error) { return ms_tag_state(tag.c_str(), &state, error); });
    return state;
  });
  m.def("tag_backup", [](const std::string& tag) {
    int backup = 0;
    without_gil([&](ms_error* error) { return ms_tag_backup(tag.c_str(), &backup, error); });
    return backup;
  });
  m.def("stats", [] {
    ms_usage* rows = nullptr;
    size_t count = 0;
    without_gil([&](ms_error* error) { return ms_stats(&rows, &count, error); });
    return list_of(rows, count, [](const ms_usage& u) {
      py::dict row;
      row["tag"] = u.tag;
      row["device"] = u.device;
      row["state"] = u.state;
      row["backup"] = u.backup;
      row["allocations"] = u.allocations;
      row["allocated_bytes"] = u.allocated_bytes;
      row["resident_bytes"] = u.resident_bytes;
      row["backup_bytes"] = u.backup_bytes;
      row["host_bytes"] = u.host_bytes;
      row["pauses"] = u.pauses;
      row["resumes"] = u.resumes;
      row["last_pause_seconds"] = u.last_pause_seconds;
      row["last_resume_seconds"] = u.last_resume_seconds;
      return row;
    });
  });
  m.def(
      "ranges",
      [](const std::string& tag, int device) {
        ms_range* rows = nullptr;
        size_t count = 0;
        without_gil(
            [&](ms_error* error) { return ms_ranges(tag.c_str(), device, &rows, &count, error); });
        return list_of(rows, count,
                       [](const ms_range& r) { return py::make_tuple(r.address, r.bytes); });
      },
      py::arg("tag"), py::arg("device") = -1);
  m.def("backup_view", [](uint64_t address, uint64_t bytes) {
    void* host = nullptr;
    without_gil([&](ms_error* error) { return ms_backup_view(address, bytes, &host, error); });
    return py::memoryview::from_memory(host, static_cast<py::ssize_t>(bytes));
  });
  m.def("trim", [] {
    uint64_t released = 0;
    without_gil([&](ms_error* error) { return ms_trim(&released, error); });
    return released;
  });
}
