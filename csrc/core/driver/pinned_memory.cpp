#include "core/driver/pinned_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/driver/driver.h"
#include "core/platform/status.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

[[noreturn]] void refuse(const std::string& what, uint64_t bytes, const char* call,
                         CUresult result) {
  Error error(Status::kOutOfHostMemory, what);
  error.call = call;
  error.cuda_error = result;
  error.needed_bytes = bytes;
  throw error;
}

CUresult unpin_pages(uint64_t start, uint64_t) {
  return driver().cuMemHostUnregister(reinterpret_cast<void*>(start));
}

CUresult unpin_and_unmap(uint64_t start, uint64_t bytes) {
  const CUresult result = unpin_pages(start, bytes);
  if (result == CUDA_SUCCESS || is_shutdown(result)) munmap(reinterpret_cast<void*>(start), bytes);
  return result;
}

constexpr ObjectKind kind_of(CUresult (*destroy)(uint64_t, uint64_t)) {
  return {"cuMemHostUnregister",
          "pinned host memory",
          ObjectKind::Memory::kHost,
          ObjectKind::Scope::kDevice,
          true,
          destroy};
}

constexpr ObjectKind kCallersPages = kind_of(unpin_pages);
constexpr ObjectKind kOwnPages = kind_of(unpin_and_unmap);

void pin_pages(void* start, uint64_t bytes, unsigned int flags) {
  const CUresult result = driver().cuMemHostRegister(start, bytes, flags);
  if (result == CUDA_SUCCESS) return;
  refuse(describe(result, "cuMemHostRegister") + ", for " + format_bytes(bytes), bytes,
         "cuMemHostRegister", result);
}

}  // namespace

PinnedMemory::PinnedMemory(const Context& context) : object_(kCallersPages, context) {}

void PinnedMemory::pin(void* start, uint64_t bytes, unsigned int flags) {
  pin_pages(start, bytes, flags);
  object_.own(reinterpret_cast<uint64_t>(start), bytes);
}

PinnedMemory PinnedMemory::allocate(const Context& context, HostClaim claim, const char* purpose,
                                    unsigned int flags) {
  const uint64_t bytes = claim.bytes();
  if (flags == CU_MEMHOSTREGISTER_PORTABLE) {
    DriverObject again = DriverObject::take_deferred(kOwnPages, bytes);
    if (again) return PinnedMemory(std::move(again));
  }
  DriverObject object(kOwnPages, context);
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (pages == MAP_FAILED) {
    refuse("mapping " + format_bytes(bytes) + " of host memory for " + purpose +
               " failed: " + std::strerror(errno) + "; free host memory",
           bytes, "", CUDA_SUCCESS);
  }
  // Devices and files must write to these pages, not to copies in a child.
  madvise(pages, bytes, MADV_DONTFORK);
  try {
    pin_pages(pages, bytes, flags);
  } catch (...) {
    munmap(pages, bytes);
    throw;
  }
  claim.touched(bytes);
  object.own(reinterpret_cast<uint64_t>(pages), bytes, std::move(claim));
  return PinnedMemory(std::move(object));
}

void PinnedMemory::adopt(HostClaim claim) noexcept {
  object_.change_kind(kOwnPages, std::move(claim));
}

}  // namespace memsaver
