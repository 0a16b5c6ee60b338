// stats_json: this process's statistics as one line of JSON, for other processes.
#pragma once

#include <string>

namespace memsaver {

// The version of the format, incremented when a key changes its meaning or is removed.
constexpr int kStatsFormat = 1;

// Returns a JSON object followed by a newline. The keys of the object are:
//   - `format`, `memsaver` (the library's version), `pid` and `command` (the process's name)
//   - `time_seconds` (the current time, since 1970)
//   - `driver` (null, or an object with the keys `library`, `version` and `simulated`)
//   - `host_bytes` and `host_available_bytes`
//   - `devices` (a list with an object for each device on which tags have memory, with the keys
//     `device`, `bus_id` and `total_bytes`)
//   - `tags` (a list with an object for each tag and device, with the fields of Usage; `state` and
//     `backup` are names, and `caller` may be null)
// Invalid UTF-8 in names is copied unchanged.
//
// Does not open the driver and makes no driver call. Reads system files. Briefly acquires the
// registry's lock twice. Any thread.
// Errors: std::bad_alloc, kBadConfig.
std::string stats_json();

}  // namespace memsaver
