// options: every setting, in one table: name, environment variable, default, bounds, meaning.
//
// To add one: a line in MS_OPTIONS. Values come from the environment at the first use, and from
// configure().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// name, environment variable, default, least, greatest, meaning. All are sizes in bytes.
#define MS_OPTIONS(X)                                                                            \
  X(share_bytes, "MEMSAVER_SHARE_BYTES", 512ull << 20, 2ull << 20, 1ull << 30,                   \
    "allocations that lie together share one piece of physical memory of up to this many bytes " \
    "(four times as many without a backup) from a resume on: fewer pieces are faster to pause, " \
    "but memory of a deleted tensor goes "                                                       \
    "back to the driver only with its whole piece")                                              \
  X(slab_bytes, "MEMSAVER_SLAB_BYTES", 64ull << 20, 2ull << 20, 1ull << 30,                      \
    "the same for new allocations smaller than this, before the first pause")

enum class Option {
#define MS_OPTION_NAME(name, env, value, least, greatest, meaning) name,
  MS_OPTIONS(MS_OPTION_NAME)
#undef MS_OPTION_NAME
};

// The value in bytes. Throws kBadConfig when the environment's text cannot be understood.
uint64_t option(Option which);

// Reads the environment now, so that text which cannot be understood is met before anything is
// done. Throws kBadConfig.
void check_options();

// Sets by name from text: a number with an optional suffix KiB, MiB or GiB. Throws kBadConfig,
// changing nothing.
void set_option(const std::string& name, const std::string& text);

// The value as text, in bytes. Throws kBadConfig for an unknown name.
std::string option_text(const std::string& name);

// The names, for messages.
std::vector<std::string> option_names();

}  // namespace memsaver
