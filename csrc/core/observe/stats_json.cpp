#include "core/observe/stats_json.h"

#include <locale.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string_view>

#include "core/driver/driver.h"
#include "core/memory/registry.h"
#include "core/observe/stats.h"
#include "core/platform/system_files.h"

namespace memsaver {
namespace {

// While this object exists, the thread that created it formats numbers with a decimal point in
// every locale.
class PlainNumbers {
 public:
  PlainNumbers() : plain_(newlocale(LC_ALL_MASK, "C", nullptr)) {
    if (plain_) before_ = uselocale(plain_);
  }
  ~PlainNumbers() {
    if (!plain_) return;
    uselocale(before_);
    freelocale(plain_);
  }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;

 private:
  const locale_t plain_;
  locale_t before_ = nullptr;
};

std::string quoted_json(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

// A JSON object: `Object().add("name", 1).add("other", "text").text()`.
class Object {
 public:
  Object& add_json(const char* key, const std::string& value) {
    text_ += text_.empty() ? "{" : ",";
    text_ += '"';
    text_ += key;
    text_ += "\":";
    text_ += value;
    return *this;
  }
  Object& add(const char* key, uint64_t value) { return add_json(key, std::to_string(value)); }
  Object& add(const char* key, int value) { return add_json(key, std::to_string(value)); }
  Object& add(const char* key, bool value) { return add_json(key, value ? "true" : "false"); }
  Object& add(const char* key, std::string_view value) { return add_json(key, quoted_json(value)); }
  Object& add(const char* key, const char* value) { return add(key, std::string_view(value)); }
  // Writes all digits, so that a reader gets the same number.
  Object& add(const char* key, double value) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.17g", value);
    return add_json(key, digits);
  }
  std::string text() const { return text_ + "}"; }

 private:
  std::string text_;
};

template <typename Rows, typename Describe>
std::string list_of(const Rows& rows, Describe describe) {
  std::string list = "[";
  for (const auto& row : rows) {
    if (list.size() > 1) list += ',';
    list += describe(row);
  }
  return list + "]";
}

std::string tag_object(const Usage& usage) {
  Object row;
  row.add("tag", usage.tag)
      .add("device", usage.device)
      .add("state", name_of(static_cast<State>(usage.state)))
      .add("backup", name_of(static_cast<Backup>(usage.backup)))
      .add("since_seconds", usage.since_seconds)
      .add_json("caller", usage.caller ? quoted_json(*usage.caller) : "null");
#define MS_ADD_FIELD(type, name, meaning) row.add(#name, usage.name);
  MS_USAGE_FIELDS(MS_ADD_FIELD)
#undef MS_ADD_FIELD
  return row.text();
}

std::string device_object(const Device* device) {
  return Object()
      .add("device", device->ordinal())
      .add("bus_id", device->bus_id())
      .add("total_bytes", device->total_bytes())
      .text();
}

std::string driver_object(const DriverTable* table) {
  if (!table) return "null";
  return Object()
      .add("library", table->opened)
      .add("version", table->version)
      .add("simulated", table->simulated)
      .text();
}

}  // namespace

std::string stats_json() {
  const PlainNumbers plain;
  const HostUsage host = host_usage();
  return Object()
             .add("format", kStatsFormat)
             .add("memsaver", MEMSAVER_VERSION)
             .add("pid", static_cast<int>(getpid()))
             .add("command", read_system_file("/proc/self/comm").value_or(""))
             .add("time_seconds", TransitionRecord::now().at_seconds)
             .add_json("driver", driver_object(open_driver_table()))
             .add("host_bytes", host.held_bytes)
             .add("host_available_bytes", host.available_bytes)
             .add_json("devices", list_of(devices_of_tags(), device_object))
             .add_json("tags", list_of(usage(), tag_object))
             .text() +
         "\n";
}

}  // namespace memsaver
