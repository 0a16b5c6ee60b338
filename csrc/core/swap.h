// swap: pauses some tags and resumes others in one, at the same time.
//
// The physical pages of what goes out back what comes in, without passing through the driver; what
// promises zeros is cleared by us. Copies run in both directions at once.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/transition.h"

namespace memsaver {

// Begins a swap. Tags of `out` that are paused and tags of `into` that are mapped are left as they
// are. `policy`, `dead` and `seen` are for `out`, as for a pause. Throws kUnknownTag; kInvalidState
// (an open region of a tag of `out`); kInvalidArgument (an empty side, or a tag on both).
//
// Its run throws as a pause and a resume. Then every tag of `out` is mapped with its bytes and
// every tag of `into` paused with its backup, but for two things: of tags without a backup, whose
// contents a pause discards, what was overwritten already reads as garbage; and where the driver
// also refuses to undo, the tags of `out` are paused, with all their bytes in their backups or in
// pages that are kept, as after a failed pause.
std::unique_ptr<Transition> begin_swap(const std::vector<std::string>& out,
                                       const std::vector<std::string>& into,
                                       std::optional<Backup> policy, const std::vector<Range>& dead,
                                       std::optional<uint64_t> seen);

}  // namespace memsaver
