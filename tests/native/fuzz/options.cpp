// Target: the options that the core and the simulated driver read from the environment. Includes
// their sources, so that it can reset the values that they have read.
#include "../../../csrc/core/platform/options.cpp"

#include <cstdint>

#include "../../../csrc/sim/settings.cpp"
#include "input.h"

namespace {

constexpr const char* kSimulator[] = {"MEMSAVER_SIM_DEVICES", "MEMSAVER_SIM_MEMORY",
                                      "MEMSAVER_SIM_FAULTS"};

void forget() {
  for (memsaver::Entry& entry : memsaver::table) {
    unsetenv(entry.env);
    entry.known.store(false);
  }
  for (const char* name : kSimulator) unsetenv(name);
}

// Checks that the text of each option's value is accepted and gives the same value.
void check_round_trip() {
  for (const std::string& name : memsaver::option_names()) {
    const std::string text = memsaver::option_text(name);
    memsaver::set_option(name, text);
    fuzz::require(memsaver::option_text(name) == text, "an option's text sets the same value");
  }
  for (const memsaver::Entry& entry : memsaver::table) {
    if (entry.kind == memsaver::OptionKind::kPath) continue;
    const uint64_t number = entry.number;
    const bool is_auto =
        entry.kind == memsaver::OptionKind::kDevice && number == memsaver::kAnyDevice;
    fuzz::require(is_auto || (number >= entry.least && number <= entry.greatest),
                  "an option is within its bounds");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  fuzz::Input input(bytes, count);
  forget();
  while (!input.empty()) {
    const size_t which = input.below(std::size(memsaver::table) + std::size(kSimulator));
    const char* const name = which < std::size(memsaver::table)
                                 ? memsaver::table[which].env
                                 : kSimulator[which - std::size(memsaver::table)];
    setenv(name, input.text(40).c_str(), 1);
  }
  try {
    memsaver::check_options();
    check_round_trip();
  } catch (const memsaver::Error& error) {
    fuzz::require(error.status == memsaver::Status::kBadConfig && !error.message.empty(),
                  "invalid text is a configuration error");
  }
  memsaver::sim::Settings settings;
  if (memsaver::sim::read_settings(&settings).empty()) {
    fuzz::require(settings.devices >= 0 && settings.devices <= SIM_MAX_DEVICES &&
                      settings.memory_bytes > 0 && settings.memory_bytes % (2 << 20) == 0,
                  "the simulated machine is valid");
  }
  // By name: any name, any text.
  fuzz::Input again(bytes, count);
  try {
    const std::string name = again.text(16);
    memsaver::set_option(name, again.text(40));
    memsaver::option_text(name);
  } catch (const memsaver::Error& error) {
    fuzz::require(error.status == memsaver::Status::kBadConfig,
                  "an unknown name is a configuration error");
  }
  return 0;
}
