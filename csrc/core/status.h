// status: the one error type of the core.
//
// Inside the core a failure is an Error, thrown; marshal.h turns it into an ms_status and an
// ms_error. Nothing else crosses the ABI. Destructors, which cannot throw, report through log.h.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace memsaver {

// The values are those of ms_status in memsaver.h; marshal.cpp asserts it.
enum class Status : int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kInvalidState = 2,
  kUnknownTag = 3,
  kOutOfDeviceMemory = 4,
  kOutOfHostMemory = 5,
  kBackupFailed = 6,
  kDriverFailed = 7,
  kNotLoaded = 8,
  kBadConfig = 9,
  kNotOurs = 10,
  kInternal = 11,
};

// What went wrong, with which tag and how many bytes, and what to do about it. Copyable, immutable
// once thrown but for what a frame on the way up knows better (tag, sizes, a longer message).
class Error : public std::exception {
 public:
  Error(Status status, std::string message) : status(status), message(std::move(message)) {}

  const char* what() const noexcept override { return message.c_str(); }

  Error&& with_tag(std::string name) && {
    tag = std::move(name);
    return std::move(*this);
  }

  Status status;
  std::string message;
  const char* addition = "";  // to the message, with static storage: there may be no host memory
  std::string tag;
  const char* call = "";   // a driver call's name, with static storage
  int32_t cuda_error = 0;  // its CUresult
  int32_t os_error = 0;    // the errno of the system call that failed, 0 where none did
  int32_t device = -1;     // where device memory was short
  uint64_t needed_bytes = 0;
  uint64_t free_bytes = 0;
};

}  // namespace memsaver
