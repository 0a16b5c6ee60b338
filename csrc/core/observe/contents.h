// contents: fingerprints of device memory, for comparing contents between processes.
#pragma once

#include <vector>

#include "core/backup/fingerprint.h"
#include "core/platform/range.h"

namespace memsaver {

// Returns the fingerprints of device memory, in order. The memory need not belong to this library.
// Each range is divided, from its start, into pieces of kFingerprintBytes bytes, so that equal
// bytes have equal fingerprints at every address. Waits for work submitted earlier to the devices
// and for transitions of the affected tags. While this function runs, it owns a Hold on these tags.
// May be called inside a stream capture.
// Errors: kInvalidArgument if a range is not device memory; kInvalidState if a range belongs to a
// paused tag or is outside live allocations; kDriverFailed, for example if the kernel does not
// support the GPU; kOutOfHostMemory.
std::vector<Digest> fingerprints(const std::vector<Range>& ranges);

}  // namespace memsaver
