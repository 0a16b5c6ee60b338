// neighbour: the choice of the device whose memory holds another device's backups.
#pragma once

#include "core/driver/device.h"

namespace memsaver {

// Returns the device of option `peer`. For auto, returns the device with the most free memory among
// those that `device` can access, chosen at the first call for `device`; null if it can access none
// (with a warning, once). Any thread. Throws kBadConfig for a device that does not exist, is
// `device` itself or cannot be accessed by it; kDriverFailed.
Device* neighbour_of(const Device& device);

}  // namespace memsaver
