// pause: gives the device memory of tags back; their addresses stay.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/transition.h"

namespace memsaver {

// Begins a pause of `tags` (all, when empty): waits until nobody else holds them. `policy`
// overrides the tags' own for this call; the bytes of `dead` are neither saved nor restored, unless
// Registry::changes is no longer `seen`. Throws kUnknownTag; kInvalidState (an open region).
//
// Its run waits for the work submitted to the devices before. Throws kOutOfHostMemory,
// kBackupFailed, kDriverFailed. Then every tag is as it was. One exception, where the driver
// refuses even to map pages again that a failed pause had unmapped: that tag is paused with its
// pages kept, and a resume maps them.
std::unique_ptr<Transition> begin_pause(const std::vector<std::string>& tags,
                                        std::optional<Backup> policy,
                                        const std::vector<Range>& dead,
                                        std::optional<uint64_t> seen);

}  // namespace memsaver
