#include "core/platform/options.h"

#include <fcntl.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/platform/status.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

// A path that was set. Earlier paths are kept, because a reader may still be copying one.
struct Path {
  std::string text;
  const Path* before;
};

// A parsed value: a path, or a number of any other kind.
struct Value {
  uint64_t number = 0;
  std::string path;
};

struct Entry {
  const char* name;
  OptionKind kind;
  const char* env;
  uint64_t least, greatest;
  const char* meaning;
  std::atomic<uint64_t> number;
  std::atomic<const Path*> path;
  std::atomic<bool> known;  // the environment was read, or configure() was called
};

Entry table[] = {
#define MS_OPTION_ENTRY(name, kind, env, value, least, greatest, meaning) \
  {#name, OptionKind::kind, env, least, greatest, meaning, {value}, {nullptr}, {false}},
    MS_OPTIONS(MS_OPTION_ENTRY)
#undef MS_OPTION_ENTRY
};

// Formats milliseconds as seconds: "2.5".
std::string format_seconds(uint64_t milliseconds) {
  std::string text = std::to_string(milliseconds / 1000);
  const uint64_t rest = milliseconds % 1000;
  if (rest == 0) return text;
  text += "." + std::to_string(1000 + rest).substr(1);
  while (text.back() == '0') text.pop_back();
  return text;
}

std::string takes(const Entry& entry) {
  switch (entry.kind) {
    case OptionKind::kSize:
      return "an integer number of bytes with an optional suffix KiB, MiB or GiB, from " +
             format_bytes(entry.least) + " to " + format_bytes(entry.greatest);
    case OptionKind::kFlag:
      return "on, off, 1, 0, true or false";
    case OptionKind::kPath:
      return "an existing, writable directory, or an empty text for the default";
    case OptionKind::kDevice:
      return "auto, or the ordinal of a device that the process sees, from " +
             std::to_string(entry.least) + " to " + std::to_string(entry.greatest);
    case OptionKind::kSeconds:
      return "a number of seconds with up to three decimals, from " + format_seconds(entry.least) +
             " to " + format_seconds(entry.greatest);
  }
  return "";
}

[[noreturn]] void refuse(const Entry& entry, const std::string& text, int reason = 0) {
  Error error(Status::kBadConfig,
              "option " + std::string(entry.name) + " (" + entry.env + ") cannot be " +
                  quoted(text) + (reason ? " (" + std::string(std::strerror(reason)) + ")" : "") +
                  ": it takes " + takes(entry) + "; its meaning: " + entry.meaning);
  error.os_error = reason;
  throw error;
}

uint64_t parse_size(const Entry& entry, const std::string& text) {
  if (text.empty() || text[0] < '0' || text[0] > '9') refuse(entry, text);
  char* end = nullptr;
  errno = 0;
  uint64_t value = std::strtoull(text.c_str(), &end, 10);
  if (errno != 0) refuse(entry, text);
  const std::string suffix(end);
  int shift = 0;
  if (suffix == "KiB") {
    shift = 10;
  } else if (suffix == "MiB") {
    shift = 20;
  } else if (suffix == "GiB") {
    shift = 30;
  } else if (!suffix.empty()) {
    refuse(entry, text);
  }
  if (value > (UINT64_MAX >> shift)) refuse(entry, text);
  value <<= shift;
  if (value < entry.least || value > entry.greatest) refuse(entry, text);
  return value;
}

uint64_t parse_flag(const Entry& entry, const std::string& text) {
  for (const char* yes : {"on", "1", "true"}) {
    if (strcasecmp(text.c_str(), yes) == 0) return 1;
  }
  for (const char* no : {"off", "0", "false"}) {
    if (strcasecmp(text.c_str(), no) == 0) return 0;
  }
  refuse(entry, text);
}

// Makes the path absolute, so that a later chdir does not change its meaning.
std::string parse_path(const Entry& entry, const std::string& text) {
  if (text.empty()) return text;
  const std::unique_ptr<char, decltype(&std::free)> whole(realpath(text.c_str(), nullptr),
                                                          &std::free);
  struct stat facts;
  if (!whole || stat(whole.get(), &facts) != 0) refuse(entry, text, errno);
  if (!S_ISDIR(facts.st_mode)) refuse(entry, text, ENOTDIR);
  if (faccessat(AT_FDCWD, whole.get(), W_OK | X_OK, AT_EACCESS) != 0) refuse(entry, text, errno);
  return whole.get();
}

uint64_t parse_device(const Entry& entry, const std::string& text) {
  if (strcasecmp(text.c_str(), "auto") == 0) return kAnyDevice;
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) {
    refuse(entry, text);
  }
  errno = 0;
  const uint64_t ordinal = std::strtoull(text.c_str(), nullptr, 10);
  if (errno != 0 || ordinal < entry.least || ordinal > entry.greatest) refuse(entry, text);
  return ordinal;
}

uint64_t parse_seconds(const Entry& entry, const std::string& text) {
  const size_t point = std::min(text.find('.'), text.size());
  const std::string whole = text.substr(0, point);
  std::string part = point < text.size() ? text.substr(point + 1) : "0";
  const bool has_digits = !whole.empty() && !part.empty() &&
                          (whole + part).find_first_not_of("0123456789") == std::string::npos;
  if (!has_digits || whole.size() > 9 || part.size() > 3) refuse(entry, text);
  part.resize(3, '0');
  const uint64_t value = std::stoull(whole) * 1000 + std::stoull(part);
  if (value < entry.least || value > entry.greatest) refuse(entry, text);
  return value;
}

Value parse(const Entry& entry, const std::string& text) {
  switch (entry.kind) {
    case OptionKind::kSize:
      return {parse_size(entry, text), {}};
    case OptionKind::kFlag:
      return {parse_flag(entry, text), {}};
    case OptionKind::kPath:
      return {0, parse_path(entry, text)};
    case OptionKind::kDevice:
      return {parse_device(entry, text), {}};
    case OptionKind::kSeconds:
      return {parse_seconds(entry, text), {}};
  }
  throw Error(Status::kInternal, "an option has an unknown kind");
}

void set(Entry& entry, const std::string& text) {
  const Value value = parse(entry, text);
  if (entry.kind == OptionKind::kPath) {
    Path* const fresh = new Path{value.path, entry.path.load()};
    while (!entry.path.compare_exchange_weak(fresh->before, fresh)) {
    }
  } else {
    entry.number.store(value.number);
  }
  entry.known.store(true, std::memory_order_release);
}

Entry& find(const std::string& name) {
  for (Entry& entry : table) {
    if (name == entry.name) return entry;
  }
  throw Error(Status::kBadConfig, "there is no option " + quoted(name) + "; the options are " +
                                      format_names(option_names()));
}

// Returns the entry, first reading the environment if necessary.
const Entry& read(Entry& entry) {
  if (!entry.known.load(std::memory_order_acquire)) {
    // Paths use secure_getenv because contents are written to them (see SECURITY.md).
    const bool is_path = entry.kind == OptionKind::kPath;
    if (const char* text = is_path ? secure_getenv(entry.env) : std::getenv(entry.env)) {
      set(entry, text);
    } else {
      entry.known.store(true, std::memory_order_release);
    }
  }
  return entry;
}

const Entry& read(Option which, OptionKind kind) {
  Entry& entry = table[static_cast<size_t>(which)];
  if (entry.kind != kind) {
    throw Error(Status::kInternal,
                "option " + std::string(entry.name) + " was read as an option of another kind");
  }
  return read(entry);
}

std::string path_of(const Entry& entry) {
  const Path* const path = entry.path.load();
  return path ? path->text : "";
}

}  // namespace

uint64_t option(Option which) { return read(which, OptionKind::kSize).number.load(); }

bool flag(Option which) { return read(which, OptionKind::kFlag).number.load() != 0; }

uint64_t device_option(Option which) { return read(which, OptionKind::kDevice).number.load(); }

std::chrono::milliseconds time_option(Option which) {
  return std::chrono::milliseconds(read(which, OptionKind::kSeconds).number.load());
}

std::string path(Option which) { return path_of(read(which, OptionKind::kPath)); }

void check_options() {
  for (Entry& entry : table) read(entry);
}

void set_option(const std::string& name, const std::string& text) { set(find(name), text); }

void check_option(const std::string& name, const std::string& text) { parse(find(name), text); }

std::string option_text(const std::string& name) {
  const Entry& entry = read(find(name));
  switch (entry.kind) {
    case OptionKind::kSize:
      return std::to_string(entry.number.load());
    case OptionKind::kFlag:
      return entry.number.load() ? "on" : "off";
    case OptionKind::kPath:
      return path_of(entry);
    case OptionKind::kDevice: {
      const uint64_t ordinal = entry.number.load();
      return ordinal == kAnyDevice ? "auto" : std::to_string(ordinal);
    }
    case OptionKind::kSeconds:
      return format_seconds(entry.number.load());
  }
  return "";
}

std::vector<std::string> option_names() {
  std::vector<std::string> names;
  for (const Entry& entry : table) names.push_back(entry.name);
  return names;
}

}  // namespace memsaver
