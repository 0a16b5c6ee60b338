#include "core/platform/profile.h"

#include <nvtx3/nvToolsExt.h>

#include "core/platform/text.h"

namespace memsaver {
namespace {

// Null if no profiler is attached, or the profiler supports no domains. Never destroyed, because
// threads may still be in a range during process exit.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("memsaver");
  return handle;
}

}  // namespace

bool ProfileRange::attached() noexcept { return domain() != nullptr; }

void ProfileRange::begin(const char* what, const std::vector<std::string>& names, uint64_t bytes) {
  const std::string message =
      std::string(what) + " " + format_names(names) + " " + format_bytes(bytes);
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  attributes.payload.ullValue = bytes;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = message.c_str();
  nvtxDomainRangePushEx(domain(), &attributes);
  open_ = true;
}

ProfileRange::~ProfileRange() {
  if (open_) nvtxDomainRangePop(domain());
}

}  // namespace memsaver
