#include "core/memory/foreign_span.h"

#include <algorithm>
#include <utility>

#include "core/driver/deferred_release.h"
#include "core/platform/status.h"

namespace memsaver {
namespace {

void require(bool holds, const char* otherwise) {
  if (!holds) throw Error(Status::kInvalidArgument, otherwise);
}

}  // namespace

std::unique_ptr<ForeignSpan> ForeignSpan::reserve(Device& device, uint64_t bytes) {
  const uint64_t unit = device.granularity();
  require(bytes > 0 && bytes <= UINT64_MAX - unit, "a span's size is invalid");
  VaReservation addresses = VaReservation::reserve((bytes + unit - 1) / unit * unit, unit);
  return std::unique_ptr<ForeignSpan>(new ForeignSpan(device, std::move(addresses)));
}

ForeignSpan::~ForeignSpan() {
  if (mapped_.empty()) return;
  try {
    Device::drain_active();
  } catch (...) {
    // The context is lost or gone, so no work uses the memory.
  }
}

void ForeignSpan::map(std::vector<ForeignExtent> extents) {
  const uint64_t unit = device_.granularity();
  std::sort(extents.begin(), extents.end(),
            [](const ForeignExtent& a, const ForeignExtent& b) { return a.offset < b.offset; });
  uint64_t end = 0;
  for (const ForeignExtent& extent : extents) {
    require(extent.bytes > 0 && extent.bytes % unit == 0 && extent.offset % unit == 0 &&
                extent.offset <= addresses_.bytes() &&
                extent.bytes <= addresses_.bytes() - extent.offset,
            "an imported extent lies outside its span");
    const auto after = mapped_.lower_bound(extent.offset);
    const bool overlaps =
        extent.offset < end ||
        (after != mapped_.end() && after->first < extent.offset + extent.bytes) ||
        (after != mapped_.begin() &&
         std::prev(after)->first + std::prev(after)->second.bytes() > extent.offset);
    require(!overlaps, "an imported extent overlaps another one");
    end = extent.offset + extent.bytes;
  }
  retry_releases(Retry::kWithoutWaiting);  // may free the addresses of these extents
  const std::vector<CUmemAccessDesc> access = device_.access();
  std::map<uint64_t, Mapping> added;
  std::vector<Range> runs;  // adjacent mappings get access in one call, which is faster
  for (const ForeignExtent& extent : extents) {
    const uint64_t at = address() + extent.offset;
    Mapping& mapping = added[extent.offset];
    mapping = Mapping::place(at, PhysicalMemory::import_from(extent.descriptor, extent.bytes));
    append(runs, at, at + extent.bytes);
  }
  for (const Range& run : runs) Mapping::allow(run, access);
  mapped_.merge(added);
}

void ForeignSpan::unmap(const std::vector<uint64_t>& offsets) {
  Device::drain_active();
  for (const uint64_t offset : offsets) {
    const auto found = mapped_.find(offset);
    if (found == mapped_.end()) continue;
    found->second.unmap();
    mapped_.erase(found);
  }
}

}  // namespace memsaver
