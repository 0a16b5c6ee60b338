// stats_json: this process's figures as one line of JSON, for whoever watches it.
#pragma once

#include <string>

namespace memsaver {

// The format's number, raised when a key changes its meaning or goes.
constexpr int kStatsFormat = 1;

// An object and a newline: `format`, `memsaver` (its version), `pid`, `command` (the process's
// name), `time_seconds` (now, since 1970), `driver` (null, or an object of `library`, `version` and
// `simulated`), `host_bytes` and `host_available_bytes`, `devices` (objects of `device`, `bus_id`
// and `total_bytes`, those that tags have memory of), `tags` (an object for each tag and device:
// the fields of Usage, `state` and `backup` as words, `caller` null where nobody said). What is no
// UTF-8 in a name is as the process gave it.
//
// Opens no driver and makes no driver call; reads files of the system; takes the registry's lock
// twice, for a moment. Any thread. Throws std::bad_alloc, kBadConfig.
std::string stats_json();

}  // namespace memsaver
