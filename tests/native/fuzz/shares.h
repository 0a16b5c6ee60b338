// shares: memory that the fuzzed process both exports and imports.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "input.h"
#include "memsaver_sharing.h"

namespace fuzz {

class Shares {
 public:
  // Makes one of the calls for shared memory and returns its status.
  ms_status act(Input& in, const char* tag, const std::vector<ms_range>& ranges, int device,
                uint64_t bytes, ms_error* error) {
    switch (in.below(7)) {
      case 0:
        return ms_tag_make_shareable(tag, error);
      case 1:
        return importer_ ? MS_OK : ms_importer_open(getpid(), &importer_, error);
      case 2:
        return export_extents(in, ranges, error);
      case 3:
        return reserve(device, bytes, error);
      case 4:
        return map(in, bytes, error);
      case 5:
        return query(ranges, error);
      default:
        release(in.below(2) ? &in : nullptr);
        return MS_OK;
    }
  }

  // Releases everything.
  void clear() {
    release(nullptr);
    for (const ms_exported& extent : extents_) close(extent.descriptor);
    extents_.clear();
  }

 private:
  ms_status export_extents(Input& in, const std::vector<ms_range>& ranges, ms_error* error) {
    ms_exported* rows = nullptr;
    size_t count = 0;
    const size_t most = in.below(3) ? SIZE_MAX : in.below(3);
    const ms_status status =
        ms_importer_export(importer_, ranges.data(), ranges.size(), most, &rows, &count, error);
    if (status == MS_OK) require(count <= most, "no more extents than requested are exported");
    for (size_t i = 0; status == MS_OK && i < count; ++i) extents_.push_back(rows[i]);
    ms_list_free(rows);
    return status;
  }

  ms_status reserve(int device, uint64_t bytes, ms_error* error) {
    if (span_) return MS_OK;
    return ms_foreign_span_reserve(device, bytes, &span_, &address_, error);
  }

  ms_status map(Input& in, uint64_t bytes, ms_error* error) {
    ms_foreign_extent wanted{in.below(4) ? uint64_t{in.below(8)} << 21 : in.word(), bytes, -1};
    if (!extents_.empty()) {
      const ms_exported& extent = extents_[in.below(extents_.size())];
      wanted.descriptor = extent.descriptor;
      // A wrong size is a caller's error that only the mapping reveals.
      if (in.below(8)) wanted.bytes = extent.bytes;
    }
    if (in.below(4) == 0) return ms_foreign_span_unmap(span_, &wanted.offset, 1, error);
    const ms_status status = ms_foreign_span_map(span_, &wanted, 1, error);
    if (status == MS_OK) {
      auto* const memory = reinterpret_cast<char*>(address_ + wanted.offset);
      std::memset(memory + wanted.bytes - 1, 1, 1);  // writable to its end
    }
    return status;
  }

  ms_status query(const std::vector<ms_range>& ranges, ms_error* error) {
    ms_exported* rows = nullptr;
    ms_import* imports = nullptr;
    size_t count = 0;
    const ms_range range = ranges.empty() ? ms_range{0, 0} : ranges[0];
    require(ms_importers(&imports, &count, nullptr) == MS_OK, "the importers can be queried");
    ms_list_free(imports);
    const ms_status status = ms_exportable(range.address, range.bytes, &rows, &count, error);
    ms_list_free(rows);
    return status;
  }

  // Releases some of the importer's extents if `in` is set. Otherwise, releases the span and closes
  // the importer.
  void release(Input* in) {
    if (in && importer_ && !extents_.empty()) {
      const uint64_t ids[] = {extents_[in->below(extents_.size())].id, in->word()};
      require(ms_importer_released(importer_, ids, 2, nullptr) == MS_OK, "a release succeeds");
      return;
    }
    ms_foreign_span_free(span_);
    span_ = nullptr;
    ms_importer_close(importer_);
    importer_ = nullptr;
  }

  ms_importer* importer_ = nullptr;
  ms_foreign_span* span_ = nullptr;
  uint64_t address_ = 0;
  std::vector<ms_exported> extents_;
};

}  // namespace fuzz
