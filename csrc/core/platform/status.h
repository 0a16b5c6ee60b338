// status: the only error type of the core.
//
// The core throws failures as an Error; marshal.h converts it to an ms_status and an ms_error.
// Nothing else crosses the ABI. Destructors, which cannot throw, report through log.h.
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
  kTagShared = 12,
  kSharingFailed = 13,
};

// The message states what went wrong, to which tag, how many bytes, and what to do. Copyable.
// Immutable once thrown, except that callers may add details (the tag, sizes, a longer message).
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
  // Appended to the message. Static storage, because there may be no host memory.
  const char* addition = "";
  std::string tag;
  const char* call = "";   // a driver call's name, with static storage
  int32_t cuda_error = 0;  // its CUresult
  int32_t os_error = 0;    // the errno of the failed system call, or 0
  // The device has no memory for the requested pages, or option margin_bytes leaves none. Reported
  // as Registry::shortage, with the tags that use memory.
  bool no_physical_memory = false;
  int32_t device = -1;  // the device that is out of memory
  uint64_t needed_bytes = 0;
  uint64_t free_bytes = 0;
};

}  // namespace memsaver
