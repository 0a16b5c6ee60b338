// options: a table of all settings, with their names, kinds, environment variables, defaults,
// bounds and meanings.
//
// To add an option, add a line to MS_OPTIONS. Values are read from the environment on first use;
// configure() changes them. Any thread may call these functions at any time; no function acquires a
// lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace memsaver {

// The kind of an option's value.
enum class OptionKind {
  kSize,     // a number of bytes with an optional suffix KiB, MiB or GiB
  kFlag,     // on, off, 1, 0, true or false, in upper or lower case
  kPath,     // an existing directory that can be written to, kept as its absolute path; "": the
             // default
  kDevice,   // the ordinal of a device, or auto
  kSeconds,  // a number of seconds with up to three decimals, kept in milliseconds
};

// The value of a kDevice option that is set to auto.
constexpr uint64_t kAnyDevice = UINT64_MAX;

// The columns are: name, kind, environment variable, default, minimum, maximum, meaning. Sizes are
// in bytes; times are in milliseconds. A flag is 1 or 0. A path is empty by default and has no
// bounds.
#define MS_OPTIONS(X)                                                                           \
  X(share_bytes, kSize, "MEMSAVER_SHARE_BYTES", 512ull << 20, 2ull << 20, 1ull << 30,           \
    "after a resume, adjacent allocations share one piece of physical memory of up to this "    \
    "many bytes (six times as many without a backup, at most 3 GiB): fewer pieces are paused "  \
    "faster, but the memory of a deleted tensor is released only with its whole piece")         \
  X(slab_bytes, kSize, "MEMSAVER_SLAB_BYTES", 64ull << 20, 2ull << 20, 1ull << 30,              \
    "before the first pause, new allocations below a quarter of this size share pieces of up "  \
    "to this size")                                                                             \
  X(margin_bytes, kSize, "MEMSAVER_MARGIN_BYTES", 0, 0, 1ull << 60,                             \
    "device memory that a new allocation must leave free; an allocation that would leave less " \
    "fails with an out-of-memory error, so that torch releases its cached memory and retries")  \
  X(host_bytes, kSize, "MEMSAVER_HOST_BYTES", 0, 0, 1ull << 60,                                 \
    "host memory that all backups may use in total; 0: as much as the system has available")    \
  X(fingerprints, kFlag, "MEMSAVER_FINGERPRINTS", 1, 0, 1,                                      \
    "a pause skips contents whose 256-bit fingerprint equals that of the kept backup")          \
  X(poison, kFlag, "MEMSAVER_POISON", 0, 0, 1,                                                  \
    "for debugging: a resume fills memory that it does not restore from a backup with bytes "   \
    "0xFF, which are NaN in every float of 16, 32 and 64 bits, instead of zeros")               \
  X(disk_dir, kPath, "MEMSAVER_DISK_DIR", 0, 0, 0,                                              \
    "the directory for the files of backup='disk'; empty: $TMPDIR, else /var/tmp, else /tmp")   \
  X(peer, kDevice, "MEMSAVER_PEER", kAnyDevice, 0, 63,                                          \
    "the device whose memory backup='peer' uses; auto: the device with peer access that has "   \
    "the most free memory when a device's first such backup is made")                           \
  X(peer_margin_bytes, kSize, "MEMSAVER_PEER_MARGIN_BYTES", 1ull << 30, 0, 1ull << 60,          \
    "device memory that backup='peer' leaves free on the other device; contents that do not "   \
    "fit are saved in pinned host memory")                                                      \
  X(importer_seconds, kSeconds, "MEMSAVER_IMPORTER_SECONDS", 10000, 0, 3600000,                 \
    "the time that a pause waits for other processes to release tensors of its tags that they " \
    "imported, and for which the memory of a sent tensor is kept for its receiver")             \
  X(top, kFlag, "MEMSAVER_TOP", 1, 0, 1,                                                        \
    "`memsaver top` of the same user can query this process's statistics, through a socket "    \
    "that only this user can access; read when the process's first tag is created")

enum class Option {
#define MS_OPTION_NAME(name, kind, env, value, least, greatest, meaning) name,
  MS_OPTIONS(MS_OPTION_NAME)
#undef MS_OPTION_NAME
};

// Each of these functions returns the value of an option of one kind: kSize (in bytes), kFlag,
// kPath, kDevice (an ordinal, or kAnyDevice) or kSeconds. The functions throw kBadConfig if the
// environment variable is invalid, and kInternal if the option is of another kind.
uint64_t option(Option which);
bool flag(Option which);
std::string path(Option which);
uint64_t device_option(Option which);
std::chrono::milliseconds time_option(Option which);

// Reads all options from the environment, so that an invalid value is reported before any other
// work. Throws kBadConfig.
void check_options();

// Sets the option `name` to the value in `text`, which has the format of the option's kind. If the
// function throws kBadConfig, nothing has changed.
void set_option(const std::string& name, const std::string& text);

// Throws kBadConfig if set_option() would reject the value. Sets nothing.
void check_option(const std::string& name, const std::string& text);

// Returns the option's value as text that set_option() accepts: a size in bytes, "on" or "off", a
// path, an ordinal or "auto", or seconds. Throws kBadConfig for an unknown name.
std::string option_text(const std::string& name);

// Returns the names of all options, for messages.
std::vector<std::string> option_names();

}  // namespace memsaver
