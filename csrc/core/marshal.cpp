#include "core/marshal.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace memsaver {

static_assert(MS_OK == static_cast<int>(Status::kOk) &&
              MS_INVALID_ARGUMENT == static_cast<int>(Status::kInvalidArgument) &&
              MS_INVALID_STATE == static_cast<int>(Status::kInvalidState) &&
              MS_UNKNOWN_TAG == static_cast<int>(Status::kUnknownTag) &&
              MS_OUT_OF_DEVICE_MEMORY == static_cast<int>(Status::kOutOfDeviceMemory) &&
              MS_OUT_OF_HOST_MEMORY == static_cast<int>(Status::kOutOfHostMemory) &&
              MS_BACKUP_FAILED == static_cast<int>(Status::kBackupFailed) &&
              MS_DRIVER_FAILED == static_cast<int>(Status::kDriverFailed) &&
              MS_NOT_LOADED == static_cast<int>(Status::kNotLoaded) &&
              MS_BAD_CONFIG == static_cast<int>(Status::kBadConfig) &&
              MS_NOT_OURS == static_cast<int>(Status::kNotOurs) &&
              MS_INTERNAL == static_cast<int>(Status::kInternal));
static_assert(MS_MAPPED == static_cast<int>(State::kMapped) &&
              MS_SAVING == static_cast<int>(State::kSaving) &&
              MS_PAUSED == static_cast<int>(State::kPaused) &&
              MS_RESTORING == static_cast<int>(State::kRestoring));
static_assert(MS_BACKUP_NONE == static_cast<int>(Backup::kNone) &&
              MS_BACKUP_HOST == static_cast<int>(Backup::kHost) &&
              MS_BACKUP_PAGEABLE == static_cast<int>(Backup::kPageable) &&
              MS_BACKUP_DISK == static_cast<int>(Backup::kDisk));

void copy_text(char* field, size_t capacity, const std::string& text) {
  size_t bytes = std::min(text.size(), capacity - 1);
  while (bytes > 0 && bytes < text.size() &&
         (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80)
    --bytes;
  std::memcpy(field, text.data(), bytes);
  field[bytes] = 0;
}

ms_status report(const Error& failure, ms_error* error) noexcept {
  if (error) {
    std::memset(error, 0, sizeof(*error));
    error->status = static_cast<int32_t>(failure.status);
    error->cuda_error = failure.cuda_error;
    error->os_error = failure.os_error;
    error->needed_bytes = failure.needed_bytes;
    error->free_bytes = failure.free_bytes;
    std::snprintf(error->call, sizeof(error->call), "%s", failure.call);
    copy_text(error->tag, sizeof(error->tag), failure.tag);
    copy_text(error->message, sizeof(error->message), failure.message);
  }
  return static_cast<ms_status>(failure.status);
}

std::string_view view_of(const char* text, const char* what) {
  if (!text) throw Error(Status::kInvalidArgument, std::string(what) + " is null");
  return text;
}

std::string text_of(const char* text, const char* what) { return std::string(view_of(text, what)); }

void require_place(const void* place) {
  if (!place) throw Error(Status::kInvalidArgument, "there is no place for the answer");
}

std::vector<std::string> names_of(const char* const* tags, size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back(text_of(tags[i], "a tag"));
  return names;
}

std::optional<Backup> policy_of(int backup) {
  switch (backup) {
    case MS_BACKUP_DEFAULT:
      return std::nullopt;
    case MS_BACKUP_NONE:
      return Backup::kNone;
    case MS_BACKUP_HOST:
      return Backup::kHost;
    case MS_BACKUP_PAGEABLE:
      return Backup::kPageable;
    case MS_BACKUP_DISK:
      return Backup::kDisk;
    default:
      throw Error(Status::kInvalidArgument, "there is no backup " + std::to_string(backup) +
                                                ": none is 0, host is 1, pageable is 2, disk is 3");
  }
}

std::vector<Range> ranges_of(const ms_range* ranges, size_t count) {
  std::vector<Range> made;
  for (size_t i = 0; i < count; ++i) {
    made.push_back({ranges[i].address, std::min(ranges[i].bytes, UINT64_MAX - ranges[i].address)});
  }
  return made;
}

std::optional<uint64_t> value_of(const uint64_t* number) {
  return number ? std::optional<uint64_t>(*number) : std::nullopt;
}

}  // namespace memsaver
