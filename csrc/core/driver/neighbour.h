// neighbour: chooses the device whose memory stores another device's backups.
#pragma once

#include "core/driver/device.h"

namespace memsaver {

// Returns the device that option `peer` selects. If the option is auto, the first call for `device`
// chooses the device with the most free memory among those that `device` can access. If `device`
// can access no other device, returns null and issues a warning once. Any thread. Throws kBadConfig
// if the selected device does not exist, is `device` itself or cannot be accessed by `device`, and
// kDriverFailed if a driver call fails.
Device* neighbour_of(const Device& device);

}  // namespace memsaver
