#include "settings.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "device_memory.h"
#include "sim.h"

namespace memsaver::sim {
namespace {

// Reads the digits at *text, and advances *text past them.
bool read_number(const char** text, uint64_t* value) {
  if (**text < '0' || **text > '9') return false;
  char* end = nullptr;
  errno = 0;
  *value = std::strtoull(*text, &end, 10);
  *text = end;
  return errno == 0;
}

bool read_bytes(const char* text, uint64_t* bytes) {
  if (!read_number(&text, bytes)) return false;
  const std::string suffix = text;
  int shift = -1;
  if (suffix.empty()) shift = 0;
  if (suffix == "KiB") shift = 10;
  if (suffix == "MiB") shift = 20;
  if (suffix == "GiB") shift = 30;
  if (suffix == "TiB") shift = 40;
  constexpr uint64_t kMost = 1ull << 60;
  if (shift < 0 || *bytes > kMost >> shift) return false;
  *bytes <<= shift;
  return true;
}

bool read_fault(const std::string& text, Fault* fault) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return false;
  fault->call = text.substr(0, colon);
  const char* rest = text.c_str() + colon + 1;
  uint64_t code = 0;
  if (!read_number(&rest, &fault->nth) || *rest++ != ':' || !read_number(&rest, &code)) {
    return false;
  }
  fault->code = static_cast<int>(code);
  if (*rest == '\0') return true;
  return *rest++ == ':' && read_number(&rest, &fault->times) && *rest == '\0';
}

bool read_faults(const std::string& text, std::vector<Fault>* faults) {
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    Fault fault;
    if (!read_fault(text.substr(begin, end - begin), &fault)) return false;
    faults->push_back(fault);
    begin = end + 1;
  }
  return true;
}

const char* value_of(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

// Returns the first bytes for display, restricted to plain text.
std::string shown(const char* text) {
  constexpr size_t kMost = 60;
  std::string out(text, strnlen(text, kMost));
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text[out.size()] == '\0' ? out : out + "...";
}

std::string refusal(const char* name, const char* text, const std::string& takes) {
  return std::string(name) + "='" + shown(text) + "' is invalid: it takes " + takes;
}

constexpr const char* kDevices = "MEMSAVER_SIM_DEVICES";
constexpr const char* kMemory = "MEMSAVER_SIM_MEMORY";
constexpr const char* kFaults = "MEMSAVER_SIM_FAULTS";

}  // namespace

std::string read_settings(Settings* settings) {
  if (const char* text = value_of(kDevices)) {
    const char* rest = text;
    uint64_t devices = 0;
    if (!read_number(&rest, &devices) || *rest != '\0' || devices > SIM_MAX_DEVICES) {
      return refusal(kDevices, text,
                     "a number of devices, up to " + std::to_string(SIM_MAX_DEVICES));
    }
    settings->devices = static_cast<int>(devices);
  }
  if (const char* text = value_of(kMemory)) {
    const bool read = read_bytes(text, &settings->memory_bytes);
    settings->memory_bytes -= settings->memory_bytes % kGranularity;
    if (!read || settings->memory_bytes == 0) {
      return refusal(kMemory, text,
                     "the memory of each device, at least 2 MiB: a number of bytes with an "
                     "optional suffix KiB, MiB, GiB or TiB, such as 16GiB");
    }
  }
  const char* text = value_of(kFaults);
  if (text == nullptr) return "";
  Faults known;
  bool read = read_faults(text, &settings->faults);
  for (const Fault& fault : settings->faults) read = read && known.add(fault) >= 0;
  return read ? ""
              : refusal(kFaults, text,
                        "calls that fail, call:nth:code[:times], separated by commas, such as "
                        "cuMemCreate:1:2; nth counts from 1");
}

}  // namespace memsaver::sim
