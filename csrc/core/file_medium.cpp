#include "core/file_medium.h"

#include "core/status.h"

namespace memsaver {

void FileMedium::cover(const std::vector<VaReservation>& spans) {
  for (const VaReservation& span : spans) {
    if (starts_.try_emplace(span.address(), end_).second) end_ += span.bytes();
  }
}

uint64_t FileMedium::place(uint64_t address) const {
  const auto after = starts_.upper_bound(address);
  if (after == starts_.begin()) {
    throw Error(Status::kInternal,
                "no place in the file for the backup of address " + std::to_string(address));
  }
  const auto& [start, offset] = *std::prev(after);
  return offset + (address - start);
}

}  // namespace memsaver
