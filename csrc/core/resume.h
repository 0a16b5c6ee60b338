// resume: maps memory behind the addresses of paused tags again, and brings back what was saved.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/transition.h"

namespace memsaver {

// Begins a resume of `tags` (all, when empty): waits until nobody else holds them. Throws
// kUnknownTag.
//
// Its run maps and copies piece by piece, all devices side by side; what was not saved reads as
// zero. Throws kOutOfDeviceMemory, kOutOfHostMemory (staging), kBackupFailed, kDriverFailed. Then
// every tag is paused as before, and holds nothing.
std::unique_ptr<Transition> begin_resume(const std::vector<std::string>& tags);

}  // namespace memsaver
