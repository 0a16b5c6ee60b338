#include "core/abi/marshal.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/memory/region.h"
#include "core/observe/stats_server.h"
#include "core/platform/lifecycle.h"
#include "memsaver_transitions.h"

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
              MS_INTERNAL == static_cast<int>(Status::kInternal) &&
              MS_TAG_SHARED == static_cast<int>(Status::kTagShared) &&
              MS_SHARING_FAILED == static_cast<int>(Status::kSharingFailed));
static_assert(MS_MAPPED == static_cast<int>(State::kMapped) &&
              MS_SAVING == static_cast<int>(State::kSaving) &&
              MS_PAUSED == static_cast<int>(State::kPaused) &&
              MS_RESTORING == static_cast<int>(State::kRestoring));
static_assert(MS_BACKUP_NONE == static_cast<int>(Backup::kNone) &&
              MS_BACKUP_HOST == static_cast<int>(Backup::kHost) &&
              MS_BACKUP_PAGEABLE == static_cast<int>(Backup::kPageable) &&
              MS_BACKUP_DISK == static_cast<int>(Backup::kDisk) &&
              MS_BACKUP_PEER == static_cast<int>(Backup::kPeer));

void copy_end_of_text(char* field, size_t capacity, const std::string& text) {
  size_t from = text.size() - std::min(text.size(), capacity - 1);
  while (from > 0 && from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80)
    ++from;
  std::memcpy(field, text.data() + from, text.size() - from);
  field[text.size() - from] = 0;
}

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
    error->device = failure.device;
    error->needed_bytes = failure.needed_bytes;
    error->free_bytes = failure.free_bytes;
    std::snprintf(error->call, sizeof(error->call), "%s", failure.call);
    copy_text(error->tag, sizeof(error->tag), failure.tag);
    const size_t room = sizeof(error->message) - std::strlen(failure.addition);
    copy_text(error->message, room, failure.message);
    if (error->message[0] == 0 && error->call[0] != 0) {  // no memory for the message
      std::snprintf(error->message, room, "%s failed (%d), and there is no host memory for details",
                    failure.call, static_cast<int>(failure.cuda_error));
    }
    std::strcat(error->message, failure.addition);
  }
  return static_cast<ms_status>(failure.status);
}

void require_tags() {
  require_not_forked();
  if (current_tag()) stats_server::start();  // the process's own tag has no region
}

std::string_view view_of(const char* text, const char* what) {
  if (!text) throw Error(Status::kInvalidArgument, std::string(what) + " is null");
  return text;
}

std::string text_of(const char* text, const char* what) { return std::string(view_of(text, what)); }

void require_place(const void* place) {
  if (!place) throw Error(Status::kInvalidArgument, "the pointer for the result is null");
}

void require_list(const void* list, size_t count, const char* what) {
  if (list || count == 0) return;
  throw Error(Status::kInvalidArgument,
              "the list of " + std::string(what) + " is null, but its count is not 0");
}

std::vector<std::string> names_of(const char* const* tags, size_t count) {
  if (count == MS_ALL_TAGS) {
    throw Error(Status::kInvalidArgument, "MS_ALL_TAGS selects tags only for ms_transition_begin");
  }
  require_list(tags, count, "tags");
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
    case MS_BACKUP_PEER:
      return Backup::kPeer;
    default:
      throw Error(Status::kInvalidArgument, "there is no backup " + std::to_string(backup) +
                                                ": none is 0, host is 1, pageable is 2, disk is 3, "
                                                "peer is 4");
  }
}

std::vector<Range> ranges_of(const ms_range* ranges, size_t count) {
  require_list(ranges, count, "ranges");
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
