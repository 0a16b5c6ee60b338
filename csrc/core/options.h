// options: every setting, in one table: name, kind, environment variable, default, bounds, meaning.
//
// To add one: a line in MS_OPTIONS. Values come from the environment at the first use, and from
// configure(). Any thread, at any time; nothing here takes a lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// What an option's text can be.
enum class OptionKind {
  kSize,  // a number of bytes with an optional suffix KiB, MiB or GiB
  kFlag,  // on, off, 1, 0, true or false, in either case
  kPath,  // an existing directory that can be written to, kept as its absolute path; "": the
          // default
};

// name, kind, environment variable, default, least, greatest, meaning. Sizes are in bytes; a flag
// is 1 or 0; a path is empty by default and has no bounds.
#define MS_OPTIONS(X)                                                                            \
  X(share_bytes, kSize, "MEMSAVER_SHARE_BYTES", 512ull << 20, 2ull << 20, 1ull << 30,            \
    "allocations that lie together share one piece of physical memory of up to this many bytes " \
    "(without a backup six times, at most 3 GiB) from a resume on: fewer pieces are faster to "  \
    "pause, "                                                                                    \
    "but memory of a deleted tensor goes "                                                       \
    "back to the driver only with its whole piece")                                              \
  X(slab_bytes, kSize, "MEMSAVER_SLAB_BYTES", 64ull << 20, 2ull << 20, 1ull << 30,               \
    "the same for new allocations smaller than this, before the first pause")                    \
  X(margin_bytes, kSize, "MEMSAVER_MARGIN_BYTES", 0, 0, 1ull << 60,                              \
    "device memory that a new allocation must leave free; one that would not is out of memory, " \
    "so that torch first gives back what it caches")                                             \
  X(host_bytes, kSize, "MEMSAVER_HOST_BYTES", 0, 0, 1ull << 60,                                  \
    "host memory that backups may hold in total; 0 is as much as the system can spare")          \
  X(fingerprints, kFlag, "MEMSAVER_FINGERPRINTS", 1, 0, 1,                                       \
    "a pause leaves out what equals its kept backup, by a 256-bit fingerprint")                  \
  X(poison, kFlag, "MEMSAVER_POISON", 0, 0, 1,                                                   \
    "for debugging: what a resume does not bring back from a backup is filled with bytes 0xFF, " \
    "which are NaN in every float of 16, 32 and 64 bits, instead of zeros")                      \
  X(disk_dir, kPath, "MEMSAVER_DISK_DIR", 0, 0, 0,                                               \
    "the directory of the files of backup='disk'; empty is $TMPDIR, else /var/tmp, else /tmp")   \
  X(top, kFlag, "MEMSAVER_TOP", 1, 0, 1,                                                         \
    "`memsaver top` of the same user may ask this process for its figures, by a socket that "    \
    "only this user may use; counts until the process's first tag is made")

enum class Option {
#define MS_OPTION_NAME(name, kind, env, value, least, greatest, meaning) name,
  MS_OPTIONS(MS_OPTION_NAME)
#undef MS_OPTION_NAME
};

// The value of an option of kind kSize, in bytes; of kind kFlag; of kind kPath. Throws kBadConfig
// when the environment's text cannot be understood, kInternal for an option of another kind.
uint64_t option(Option which);
bool flag(Option which);
std::string path(Option which);

// Reads the environment now, so that text which cannot be understood is met before anything is
// done. Throws kBadConfig.
void check_options();

// Sets by name from the text that its kind takes. Throws kBadConfig, changing nothing.
void set_option(const std::string& name, const std::string& text);

// The value as text that set_option takes: a size in bytes, "on" or "off", a path. Throws
// kBadConfig for an unknown name.
std::string option_text(const std::string& name);

// The names, for messages.
std::vector<std::string> option_names();

}  // namespace memsaver
