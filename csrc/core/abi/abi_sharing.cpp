// abi_sharing: memsaver_sharing.h's functions. Only converts types and exceptions.
#include <memory>
#include <vector>

#include "core/abi/marshal.h"
#include "core/memory/exports.h"
#include "core/memory/foreign_span.h"
#include "core/memory/importer.h"
#include "core/platform/lifecycle.h"
#include "memsaver_sharing.h"

namespace {

using namespace memsaver;

Importer* unwrap(ms_importer* importer) { return unwrapped<Importer>(importer, "the importer"); }

ForeignSpan* unwrap(ms_foreign_span* span) { return unwrapped<ForeignSpan>(span, "the span"); }

void return_extents(std::vector<ExportedExtent>& extents, ms_exported** rows, size_t* row_count) {
  require_place(rows);
  *rows = nullptr;
  auto list = make_list<ms_exported>(extents.size());
  for (size_t i = 0; i < extents.size(); ++i) {
    ExportedExtent& e = extents[i];
    list.get()[i] = {e.range.address, e.range.bytes,         e.span.address, e.span.bytes, e.id,
                     e.device,        e.descriptor.release()};
  }
  if (row_count) *row_count = extents.size();
  *rows = list.release();
}

}  // namespace

extern "C" {

ms_status ms_tag_make_shareable(const char* tag, ms_error* error) {
  return on_tag(tag, error, [&](Tag& found) { make_shareable(found); });
}

ms_status ms_exportable(uint64_t address, uint64_t bytes, ms_exported** rows, size_t* row_count,
                        ms_error* error) {
  return in_own_process(error, [&] {
    std::vector<ExportedExtent> extents = exportable_extents({address, bytes});
    return_extents(extents, rows, row_count);
  });
}

ms_status ms_importer_open(int64_t pid, ms_importer** importer, ms_error* error) {
  return in_own_process(error, [&] {
    require_place(importer);
    *importer = reinterpret_cast<ms_importer*>(Importer::open(pid).release());
  });
}

ms_status ms_importer_export(ms_importer* importer, const ms_range* ranges, size_t count,
                             size_t most, ms_exported** rows, size_t* row_count, ms_error* error) {
  return in_own_process(error, [&] {
    require_place(rows);
    Importer& to = *unwrap(importer);
    std::vector<ExportedExtent> extents = export_extents(to, ranges_of(ranges, count), most);
    try {
      return_extents(extents, rows, row_count);
    } catch (...) {  // without host memory for the list, the process does not get the extents
      for (const ExportedExtent& extent : extents) to.released(&extent.id, 1);
      throw;
    }
  });
}

ms_status ms_importer_released(ms_importer* importer, const uint64_t* ids, size_t count,
                               ms_error* error) {
  return in_own_process(error, [&] {
    require_list(ids, count, "ids");
    unwrap(importer)->released(ids, count);
  });
}

void ms_importer_close(ms_importer* importer) {
  if (forked()) return;
  guarded(nullptr, [&] { delete reinterpret_cast<Importer*>(importer); });
}

ms_status ms_importers(ms_import** rows, size_t* row_count, ms_error* error) {
  return in_own_process(error, [&] {
    std::vector<ms_import> found;
    {
      std::lock_guard<std::mutex> lock(Registry::instance().mutex);
      for (const Importer* importer : Registry::instance().importers) {
        for (const auto& [tag, bytes] : importer->bytes()) {
          found.push_back({tag->name.c_str(), importer->pid(), bytes});
        }
      }
    }
    return_list(found, [](const ms_import& row) { return row; }, rows, row_count);
  });
}

ms_status ms_release_requests(int* descriptor, ms_error* error) {
  return in_own_process(error, [&] {
    require_place(descriptor);
    *descriptor = release_requests();
  });
}

ms_status ms_foreign_span_reserve(int device, uint64_t bytes, ms_foreign_span** span,
                                  uint64_t* address, ms_error* error) {
  return in_own_process(error, [&] {
    require_place(span);
    require_place(address);
    std::unique_ptr<ForeignSpan> made =
        ForeignSpan::reserve(Device::get(device < 0 ? Device::current() : device), bytes);
    *address = made->address();
    *span = reinterpret_cast<ms_foreign_span*>(made.release());
  });
}

ms_status ms_foreign_span_map(ms_foreign_span* span, const ms_foreign_extent* extents, size_t count,
                              ms_error* error) {
  return in_own_process(error, [&] {
    require_list(extents, count, "extents");
    std::vector<ForeignExtent> wanted;
    for (size_t i = 0; i < count; ++i) {
      wanted.push_back({extents[i].offset, extents[i].bytes, extents[i].descriptor});
    }
    unwrap(span)->map(std::move(wanted));
  });
}

ms_status ms_foreign_span_unmap(ms_foreign_span* span, const uint64_t* offsets, size_t count,
                                ms_error* error) {
  return in_own_process(error, [&] {
    require_list(offsets, count, "offsets");
    unwrap(span)->unmap(std::vector<uint64_t>(offsets, offsets + count));
  });
}

void ms_foreign_span_free(ms_foreign_span* span) {
  if (forked()) return;  // a child shares the addresses, not the memory
  guarded(nullptr, [&] { delete reinterpret_cast<ForeignSpan*>(span); });
}

}  // extern "C"
