// status: the only error type of the core.
//
// The core reports a failure by throwing an Error, which marshal.h converts to an ms_status and an
// ms_error. No exception crosses the ABI. Destructors, which cannot throw, report failures through
// log.h.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace memsaver {

// The values are those of ms_status in memsaver.h; marshal.cpp asserts that the values are equal.
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
  kTagShared = 12,
  kSharingFailed = 13,
};

// The message states the problem, the tag, the number of bytes and a remedy. Copyable. A thrown
// error is immutable, except that callers may add details (the tag, sizes, a longer message).
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
  // Text that is appended to the message. It has static storage because there may be no host
  // memory.
  const char* addition = "";
  std::string tag;
  const char* call = "";   // a driver call's name, with static storage
  int32_t cuda_error = 0;  // the CUresult of `call`
  int32_t os_error = 0;    // the errno of the failed system call, or 0
  // True if the device has no memory for the requested pages, or if option margin_bytes leaves no
  // memory for them. The caller then throws the error of Registry::shortage, which lists the tags
  // that use memory.
  bool no_physical_memory = false;
  int32_t device = -1;  // the device that is out of memory
  uint64_t needed_bytes = 0;
  uint64_t free_bytes = 0;
};

}  // namespace memsaver
