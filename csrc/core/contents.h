// contents: what lies in device memory, to compare it with that of other processes.
#pragma once

#include <vector>

#include "core/fingerprint.h"
#include "core/range.h"

namespace memsaver {

// The fingerprints of any device memory, ours or not, in order: each range is cut into pieces of
// kFingerprintBytes from its own start, so that the same bytes give the same fingerprints at other
// addresses. Waits for the work submitted to the devices before, and for transitions of the tags
// concerned, which are held meanwhile. Legal inside a stream capture. Throws kInvalidArgument for
// what is no device memory, kInvalidState for memory of a paused tag or of no live allocation,
// kDriverFailed, also where the kernel does not fit the GPU; kOutOfHostMemory.
std::vector<Digest> fingerprints(const std::vector<Range>& ranges);

}  // namespace memsaver
