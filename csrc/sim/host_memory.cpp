#include "host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace memsaver::sim {
namespace {

Range pages_around(Range range) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = range.address / page * page;
  const uint64_t end = (range.end() + page - 1) / page * page;
  return {begin, end - begin};
}

bool is_mapped(Range pages) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  constexpr uint64_t kPagesAtOnce = 1 << 16;
  std::vector<unsigned char> resident(kPagesAtOnce);
  for (uint64_t at = pages.address; at < pages.end(); at += kPagesAtOnce * page) {
    const uint64_t size = std::min(kPagesAtOnce * page, pages.end() - at);
    if (mincore(reinterpret_cast<void*>(at), size, resident.data()) != 0) return false;
  }
  return true;
}

}  // namespace

bool HostMemory::fits(uint64_t bytes) const {
  const uint64_t held = pinned_bytes_ + registered_bytes_;
  return held <= limit_ && bytes <= limit_ - held;
}

CUresult HostMemory::allocate(uint64_t size, int device, uint64_t* address) {
  const uint64_t bytes = pages_around({0, size}).size;
  if (size == 0 || bytes < size) return CUDA_ERROR_INVALID_VALUE;
  if (!fits(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t at = reinterpret_cast<uint64_t>(got);
  entries_[at] = Entry{{at, size}, {at, bytes}, device, false};
  pinned_bytes_ += bytes;
  *address = at;
  return CUDA_SUCCESS;
}

CUresult HostMemory::free(uint64_t address) {
  auto found = entries_.find(address);
  if (found == entries_.end() || found->second.registered) return CUDA_ERROR_INVALID_VALUE;
  erase(found);
  return CUDA_SUCCESS;
}

CUresult HostMemory::add(Range range, int device) {
  if (range.address == 0 || range.size == 0 || range.end() < range.address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto near = entries_.upper_bound(range.address);
  if (near != entries_.begin()) --near;
  for (; near != entries_.end() && near->first < range.end(); ++near) {
    if (!near->second.taken.overlaps(range)) continue;
    return near->second.registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                                   : CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_mapped(pages_around(range))) return CUDA_ERROR_INVALID_VALUE;
  if (!fits(range.size)) return CUDA_ERROR_OUT_OF_MEMORY;
  entries_[range.address] = Entry{range, range, device, true};
  registered_bytes_ += range.size;
  return CUDA_SUCCESS;
}

CUresult HostMemory::remove(uint64_t address) {
  auto found = entries_.find(address);
  if (found == entries_.end() || !found->second.registered) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  erase(found);
  return CUDA_SUCCESS;
}

void HostMemory::drop_all_of(int device) {
  for (auto at = entries_.begin(); at != entries_.end();) {
    auto next = std::next(at);
    if (at->second.device == device) erase(at);
    at = next;
  }
}

void HostMemory::erase(Entries::iterator at) {
  const Entry& entry = at->second;
  if (entry.registered) {
    registered_bytes_ -= entry.range.size;
  } else {
    pinned_bytes_ -= entry.taken.size;
    munmap(reinterpret_cast<void*>(entry.taken.address), entry.taken.size);
  }
  entries_.erase(at);
}

const HostMemory::Entry* HostMemory::find(uint64_t address) const {
  auto at = entries_.upper_bound(address);
  if (at == entries_.begin()) return nullptr;
  --at;
  return address < at->second.range.end() ? &at->second : nullptr;
}

bool HostMemory::contains(Range range) const {
  const Entry* entry = find(range.address);
  return entry != nullptr && entry->range.contains(range);
}

bool HostMemory::leaves(Range range) const {
  const Entry* entry = find(range.address);
  return entry != nullptr && !entry->range.contains(range);
}

}  // namespace memsaver::sim
