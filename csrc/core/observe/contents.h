// contents: fingerprints of device memory, for comparing contents between processes.
#pragma once

#include <vector>

#include "core/backup/fingerprint.h"
#include "core/platform/range.h"

namespace memsaver {

// Returns the fingerprints of device memory, which need not belong to this library, in order. Each
// range is cut into pieces of kFingerprintBytes from its own start, so that equal bytes have equal
// fingerprints at every address. Waits for work submitted earlier to the devices and for
// transitions of the tags concerned, and owns a Hold on these tags while it runs. Legal inside a
// stream capture.
// Errors: kInvalidArgument if a range is not device memory; kInvalidState for memory of a paused
// tag or outside live allocations; kDriverFailed, also if the kernel does not support the GPU;
// kOutOfHostMemory.
std::vector<Digest> fingerprints(const std::vector<Range>& ranges);

}  // namespace memsaver
