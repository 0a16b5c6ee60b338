// stats_json: this process's statistics as one line of JSON, for other processes.
#pragma once

#include <string>

namespace memsaver {

// The version of the format, incremented when a key changes its meaning or is removed.
constexpr int kStatsFormat = 1;

// Returns an object and a newline: `format`, `memsaver` (its version), `pid`, `command` (the
// process's name), `time_seconds` (now, since 1970), `driver` (null, or an object of `library`,
// `version` and `simulated`), `host_bytes` and `host_available_bytes`, `devices` (objects of
// `device`, `bus_id` and `total_bytes`, for devices on which tags have memory), `tags` (an object
// for each tag and device: the fields of Usage, with the names of `state` and `backup`, and a
// `caller` that may be null). Invalid UTF-8 in names is copied unchanged.
//
// Opens no driver and makes no driver call. Reads system files. Takes the registry's lock twice,
// briefly. Any thread.
// Errors: std::bad_alloc, kBadConfig.
std::string stats_json();

}  // namespace memsaver
