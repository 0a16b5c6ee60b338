#include "core/options.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "core/status.h"
#include "core/text.h"

namespace memsaver {
namespace {

struct Entry {
  const char* name;
  const char* env;
  uint64_t least, greatest;
  const char* meaning;
  std::atomic<uint64_t> value;
  std::atomic<bool> known;  // the environment was read, or configure() was called
};

Entry table[] = {
#define MS_OPTION_ENTRY(name, env, value, least, greatest, meaning) \
  {#name, env, least, greatest, meaning, {value}, {false}},
    MS_OPTIONS(MS_OPTION_ENTRY)
#undef MS_OPTION_ENTRY
};

[[noreturn]] void refuse(const Entry& entry, const std::string& text) {
  throw Error(
      Status::kBadConfig,
      "option " + std::string(entry.name) + " (" + entry.env + ") cannot be " + quoted(text) +
          ": it takes a whole number of bytes with an optional suffix KiB, MiB or GiB, from " +
          std::to_string(entry.least) + " to " + std::to_string(entry.greatest) +
          "; its meaning: " + entry.meaning);
}

uint64_t parse(const Entry& entry, const std::string& text) {
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

Entry& find(const std::string& name) {
  for (Entry& entry : table) {
    if (name == entry.name) return entry;
  }
  throw Error(Status::kBadConfig, "there is no option " + quoted(name) + "; the options are " +
                                      format_names(option_names()));
}

uint64_t read(Entry& entry) {
  if (!entry.known.load(std::memory_order_acquire)) {
    if (const char* text = std::getenv(entry.env)) entry.value.store(parse(entry, text));
    entry.known.store(true, std::memory_order_release);
  }
  return entry.value.load(std::memory_order_relaxed);
}

}  // namespace

uint64_t option(Option which) { return read(table[static_cast<size_t>(which)]); }

void check_options() {
  for (Entry& entry : table) read(entry);
}

void set_option(const std::string& name, const std::string& text) {
  Entry& entry = find(name);
  entry.value.store(parse(entry, text));
  entry.known.store(true, std::memory_order_release);
}

std::string option_text(const std::string& name) { return std::to_string(read(find(name))); }

std::vector<std::string> option_names() {
  std::vector<std::string> names;
  for (const Entry& entry : table) names.push_back(entry.name);
  return names;
}

}  // namespace memsaver
