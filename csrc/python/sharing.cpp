#include "python/sharing.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memsaver_sharing.h"
#include "python/calls.h"

namespace memsaver::python {
namespace {

py::list list_of_extents(ms_exported* rows, size_t count) {
  return list_of(rows, count, [](const ms_exported& e) {
    return py::make_tuple(e.address, e.bytes, e.span_address, e.span_bytes, e.id, e.device,
                          e.descriptor);
  });
}

// Another process that imports memory. One call at a time. At interpreter exit another thread may
// be in a call that never returns, so the object is not destroyed after that point.
class Importer {
 public:
  ~Importer() {
    if (is_exiting()) importer_.release();
  }
  explicit Importer(int64_t pid) {
    ms_importer* opened = nullptr;
    without_gil([&](ms_error* error) { return ms_importer_open(pid, &opened, error); });
    importer_.reset(opened);
  }

  py::list export_extents(const std::vector<Pair>& ranges, size_t most) {
    const std::vector<ms_range> wanted = ranges_of(ranges);
    ms_exported* rows = nullptr;
    size_t count = 0;
    without_gil([&](ms_error* error) {
      return ms_importer_export(importer_.get(), wanted.data(), wanted.size(), most, &rows, &count,
                                error);
    });
    return list_of_extents(rows, count);
  }

  void released(const std::vector<uint64_t>& ids) {
    without_gil([&](ms_error* error) {
      return ms_importer_released(importer_.get(), ids.data(), ids.size(), error);
    });
  }

  void close() { importer_.reset(); }

 private:
  std::unique_ptr<ms_importer, decltype(&ms_importer_close)> importer_{nullptr, &ms_importer_close};
};

// Addresses for memory of another process. One call at a time; not destroyed at interpreter exit,
// like Importer.
class ForeignSpan {
 public:
  ~ForeignSpan() {
    if (is_exiting()) span_.release();
  }
  ForeignSpan(int device, uint64_t bytes) {
    ms_foreign_span* reserved = nullptr;
    without_gil([&](ms_error* error) {
      return ms_foreign_span_reserve(device, bytes, &reserved, &address_, error);
    });
    span_.reset(reserved);
  }

  uint64_t address() const { return address_; }

  void map(const std::vector<std::tuple<uint64_t, uint64_t, int>>& extents) {
    std::vector<ms_foreign_extent> wanted;
    for (const auto& [offset, bytes, descriptor] : extents) {
      wanted.push_back({offset, bytes, descriptor});
    }
    without_gil([&](ms_error* error) {
      return ms_foreign_span_map(span_.get(), wanted.data(), wanted.size(), error);
    });
  }

  void unmap(const std::vector<uint64_t>& offsets) {
    without_gil([&](ms_error* error) {
      return ms_foreign_span_unmap(span_.get(), offsets.data(), offsets.size(), error);
    });
  }

  // Waits for work on the devices.
  void drain() { unmap({}); }

 private:
  std::unique_ptr<ms_foreign_span, decltype(&ms_foreign_span_free)> span_{nullptr,
                                                                          &ms_foreign_span_free};
  uint64_t address_ = 0;
};

}  // namespace

void define_sharing(py::module_& m) {
  m.def("tag_make_shareable", [](const std::string& tag) {
    without_gil([&](ms_error* error) { return ms_tag_make_shareable(tag.c_str(), error); });
  });
  m.def("exportable", [](uint64_t address, uint64_t bytes) {
    ms_exported* rows = nullptr;
    size_t count = 0;
    interruptibly(
        [&](ms_error* error) { return ms_exportable(address, bytes, &rows, &count, error); });
    return list_of_extents(rows, count);
  });
  m.def("importers", [] {
    ms_import* rows = nullptr;
    size_t count = 0;
    without_gil([&](ms_error* error) { return ms_importers(&rows, &count, error); });
    return list_of(rows, count, [](const ms_import& row) {
      return py::make_tuple(text_of(row.tag), row.pid, row.bytes);
    });
  });
  m.def("release_requests", [] {
    int descriptor = -1;
    without_gil([&](ms_error* error) { return ms_release_requests(&descriptor, error); });
    return descriptor;
  });
  py::class_<Importer>(m, "Importer")
      .def(py::init<int64_t>(), py::arg("pid"))
      .def("export_extents", &Importer::export_extents, py::arg("ranges"),
           py::arg("most") = SIZE_MAX)
      .def("released", &Importer::released, py::arg("ids"))
      .def("close", &Importer::close);
  py::class_<ForeignSpan>(m, "ForeignSpan")
      .def(py::init<int, uint64_t>(), py::arg("device"), py::arg("bytes"))
      .def_property_readonly("address", &ForeignSpan::address)
      .def("map", &ForeignSpan::map, py::arg("extents"))
      .def("unmap", &ForeignSpan::unmap, py::arg("offsets"))
      .def("drain", &ForeignSpan::drain);
}

}  // namespace memsaver::python
