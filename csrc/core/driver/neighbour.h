// neighbour: the choice of the device whose memory holds another device's backups.
#pragma once

#include "core/driver/device.h"

namespace memsaver {

// Returns the device of option `peer`. For auto, returns the device that `device` can access and
// that had the most free memory when this function first chose for `device`, or null if it can
// access none (with a warning, once). Any thread. Throws kBadConfig for a device that does not
// exist, is `device` itself or cannot be accessed by it; kDriverFailed.
Device* neighbour_of(const Device& device);

}  // namespace memsaver
