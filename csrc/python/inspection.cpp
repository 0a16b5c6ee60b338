#include "python/inspection.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memsaver_inspection.h"
#include "python/calls.h"

namespace memsaver::python {

void define_inspection(py::module_& m) {
  // Returns the rows of one tag, or of all tags.
  m.def(
      "stats",
      [](const std::optional<std::string>& tag) {
        ms_usage* rows = nullptr;
        size_t count = 0;
        without_gil([&](ms_error* error) { return ms_stats(&rows, &count, error); });
        if (tag) {
          const auto is_another = [&](const ms_usage& u) { return *tag != u.tag; };
          count = static_cast<size_t>(std::remove_if(rows, rows + count, is_another) - rows);
        }
#define MS_FIELD_NAME(type, name, meaning) py::str(#name),
        const py::str names[] = {MS_USAGE_FIELDS(MS_FIELD_NAME)};
#undef MS_FIELD_NAME
        return list_of(rows, count, [&](const ms_usage& u) {
          py::dict row;
          row["tag"] = text_of(u.tag);
          row["device"] = u.device;
          row["state"] = u.state;
          row["backup"] = u.backup;
          const py::str* at = names;
#define MS_ADD_FIELD(type, name, meaning) row[*at++] = u.name;
          MS_USAGE_FIELDS(MS_ADD_FIELD)
#undef MS_ADD_FIELD
          return row;
        });
      },
      py::arg("tag") = py::none());
  // Returns the meaning of each figure of a row by name.
  m.def("usage_meanings", [] {
    py::dict meanings;
#define MS_ADD_MEANING(type, name, meaning) meanings[#name] = meaning;
    MS_USAGE_FIELDS(MS_ADD_MEANING)
#undef MS_ADD_MEANING
    return meanings;
  });
  m.def("host_memory", [] {
    uint64_t held_bytes = 0, available_bytes = 0;
    without_gil(
        [&](ms_error* error) { return ms_host_memory(&held_bytes, &available_bytes, error); });
    return py::make_tuple(held_bytes, available_bytes);
  });
  m.def("deferred_releases", [] {
    uint64_t objects = 0, device_bytes = 0, host_bytes = 0;
    without_gil([&](ms_error* error) {
      return ms_deferred_releases(&objects, &device_bytes, &host_bytes, error);
    });
    return py::make_tuple(objects, device_bytes, host_bytes);
  });
  m.def("timeline_start", [](size_t capacity) {
    without_gil([&](ms_error* error) { return ms_timeline_start(capacity, error); });
  });
  // Returns the events, and the number of older events that were dropped.
  m.def("timeline_read", [] {
    ms_event* rows = nullptr;
    size_t count = 0;
    uint64_t dropped = 0;
    without_gil([&](ms_error* error) { return ms_timeline_read(&rows, &count, &dropped, error); });
    return py::make_tuple(
        list_of(rows, count,
                [](const ms_event& e) {
                  return py::make_tuple(
                      e.time_seconds, e.kind, e.device,
                      e.tag ? py::object(text_of(e.tag)) : py::none(), e.state, e.act, e.outcome,
                      e.thread, e.allocated_bytes, e.resident_bytes, e.transition, e.device_bytes,
                      e.copied_bytes, e.free_bytes, e.total_bytes, text_of(e.caller));
                }),
        dropped);
  });
  m.def("timeline_sample",
        [] { without_gil([](ms_error* error) { return ms_timeline_sample(error); }); });
  m.def("timeline_stop",
        [] { without_gil([](ms_error* error) { return ms_timeline_stop(error); }); });
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
  // Returns None for a foreign address.
  m.def("locate", [](uint64_t address) -> py::object {
    ms_location found{};
    ms_error error{};
    ms_status status;
    {
      const WithoutGil released;
      status = ms_locate(pointer(address), &found, &error);
    }
    if (status == MS_NOT_OURS) return py::none();
    check(status, error);
    return py::make_tuple(text_of(found.tag), found.device, found.state, found.address, found.bytes,
                          found.since_seconds, found.thread, text_of(found.caller));
  });
  m.def("fingerprint", [](const std::vector<Pair>& ranges) {
    const std::vector<ms_range> wanted = ranges_of(ranges);
    ms_digest* rows = nullptr;
    size_t count = 0;
    without_gil([&](ms_error* error) {
      return ms_fingerprint(wanted.data(), wanted.size(), &rows, &count, error);
    });
    const py::bytes digests(reinterpret_cast<const char*>(rows), count * sizeof(ms_digest));
    ms_list_free(rows);
    return digests;
  });
}

}  // namespace memsaver::python
