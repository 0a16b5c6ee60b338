// leaf: helpers that the cases of the test program share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "core/platform/status.h"

using namespace memsaver;

using Arguments = std::vector<std::string>;

inline uint64_t number(const std::string& text) { return std::strtoull(text.c_str(), nullptr, 10); }

inline void say(const std::string& text) { std::printf("%s\n", text.c_str()); }

// Prints the error if the call throws, and returns whether the call succeeded.
template <typename Call>
bool attempt(Call call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    std::printf("error %d needed %llu free %llu%s: %s\n", static_cast<int>(error.status),
                static_cast<unsigned long long>(error.needed_bytes),
                static_cast<unsigned long long>(error.free_bytes),
                error.os_error ? (" errno " + std::to_string(error.os_error)).c_str() : "",
                error.message.c_str());
    return false;
  }
}

using Cases = std::map<std::string, void (*)(const Arguments&)>;

// The cases for the backup file.
extern const Cases kFileCases;
