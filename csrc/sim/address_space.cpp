#include "address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace memsaver::sim {
namespace {

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr uint64_t kBlockAlignment = 512;

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Maps address space without access; returns 0 if there is none.
uint64_t map_nothing(uint64_t size, uint64_t alignment, uint64_t hint) {
  if (hint != 0 && hint % alignment == 0) {
    void* got = mmap(pointer(hint), size, PROT_NONE, kReserveFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == pointer(hint)) return hint;
    if (got != MAP_FAILED) munmap(got, size);
  }
  const uint64_t total = size + alignment;
  if (total < size) return 0;
  void* got = mmap(nullptr, total, PROT_NONE, kReserveFlags, -1, 0);
  if (got == MAP_FAILED) return 0;
  const uint64_t begin = reinterpret_cast<uint64_t>(got);
  const uint64_t address = (begin + total - size) / alignment * alignment;  // at the top
  if (address > begin) munmap(got, address - begin);
  const uint64_t rest = begin + total - (address + size);
  if (rest > 0) munmap(pointer(address + size), rest);
  return address;
}

int protection(const std::vector<unsigned>& access) {
  unsigned all = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  for (unsigned flags : access) all |= flags;
  if (all == CU_MEM_ACCESS_FLAGS_PROT_NONE) return PROT_NONE;
  return all == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE;
}

bool valid(const Range& range) {
  return range.size != 0 && range.end() > range.address && range.address % granularity() == 0 &&
         range.size % granularity() == 0;
}

}  // namespace

bool Mapping::allows(int device, bool write) const {
  if (from_alloc) return true;
  const auto is_enough = [write](unsigned flags) {
    return write ? flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                 : flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
  };
  if (device == kAnyDevice) return std::any_of(access.begin(), access.end(), is_enough);
  return static_cast<size_t>(device) < access.size() &&
         is_enough(access[static_cast<size_t>(device)]);
}

CUresult AddressSpace::reserve(uint64_t size, uint64_t alignment, uint64_t hint,
                               uint64_t* address) {
  if (size == 0 || size % granularity() != 0 || (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const uint64_t got = map_nothing(size, std::max(alignment, granularity()), hint);
  if (got == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  reservations_[got] = size;
  reserved_bytes_ += size;
  *address = got;
  return CUDA_SUCCESS;
}

CUresult AddressSpace::free(Range range) {
  auto found = reservations_.find(range.address);
  if (found == reservations_.end() || found->second != range.size || !is_unmapped(range)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(pointer(range.address), range.size);
  reserved_bytes_ -= range.size;
  reservations_.erase(found);
  return CUDA_SUCCESS;
}

CUresult AddressSpace::map(Range range, std::shared_ptr<PhysicalMemory> memory) {
  if (!valid(range)) return CUDA_ERROR_INVALID_VALUE;
  if (range.size != memory->size()) return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_reserved(range) || !is_unmapped(range)) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(pointer(range.address), range.size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           memory->fd(), static_cast<off_t>(memory->offset())) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Mapping mapping;
  mapping.range = range;
  mapping.id = memory->id();
  mapping.memory = std::move(memory);
  mappings_.emplace(range.address, std::move(mapping));
  return CUDA_SUCCESS;
}

bool AddressSpace::is_reserved(Range range) const {
  auto at = reservations_.upper_bound(range.address);
  if (at != reservations_.begin()) --at;
  uint64_t reached = range.address;
  for (; at != reservations_.end() && at->first <= reached; ++at) {
    reached = std::max(reached, at->first + at->second);
    if (reached >= range.end()) return true;
  }
  return false;
}

bool AddressSpace::is_unmapped(Range range) const {
  auto next = mappings_.lower_bound(range.address);
  if (next != mappings_.end() && next->first < range.end()) return false;
  return next == mappings_.begin() || std::prev(next)->second.range.end() <= range.address;
}

CUresult AddressSpace::unmap(Range range) {
  if (!valid(range) || !is_reserved(range)) return CUDA_ERROR_INVALID_VALUE;
  const auto first = mappings_.lower_bound(range.address);
  const auto last = mappings_.lower_bound(range.end());
  for (uint64_t edge : {range.address, range.end()}) {
    const Mapping* mapping = find(edge);
    if (mapping != nullptr && mapping->range.address < edge) return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(pointer(range.address), range.size, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mappings_.erase(first, last);
  return CUDA_SUCCESS;
}

CUresult AddressSpace::set_access(Range range, const CUmemAccessDesc* descriptions, size_t count,
                                  int device_count) {
  for (size_t i = 0; i < count; ++i) {
    const CUmemAccessDesc& wanted = descriptions[i];
    if (wanted.location.type != CU_MEM_LOCATION_TYPE_DEVICE || wanted.location.id < 0 ||
        wanted.location.id >= device_count) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (wanted.flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        wanted.flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        wanted.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (!valid(range) || !is_reserved(range)) return CUDA_ERROR_INVALID_VALUE;
  const auto first = mappings_.find(range.address);
  auto last = first;
  uint64_t reached = range.address;
  while (last != mappings_.end() && last->first == reached && reached < range.end()) {
    reached = last->second.range.end();
    ++last;
  }
  if (first == last || reached > range.end()) return CUDA_ERROR_INVALID_VALUE;
  for (auto at = first; at != last; ++at) {
    std::vector<unsigned> access = at->second.access;
    access.resize(static_cast<size_t>(device_count), CU_MEM_ACCESS_FLAGS_PROT_NONE);
    for (size_t i = 0; i < count; ++i) {
      access[static_cast<size_t>(descriptions[i].location.id)] = descriptions[i].flags;
    }
    const Range& whole = at->second.range;
    if (mprotect(pointer(whole.address), whole.size, protection(access)) != 0) {
      for (auto done = first; done != at; ++done) {  // restore the earlier ones
        mprotect(pointer(done->second.range.address), done->second.range.size,
                 protection(done->second.access));
      }
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  for (auto at = first; at != last; ++at) {
    std::vector<unsigned>& access = at->second.access;
    access.resize(static_cast<size_t>(device_count), CU_MEM_ACCESS_FLAGS_PROT_NONE);
    for (size_t i = 0; i < count; ++i) {
      access[static_cast<size_t>(descriptions[i].location.id)] = descriptions[i].flags;
    }
  }
  return CUDA_SUCCESS;
}

CUresult AddressSpace::allocate(DeviceMemory* device, uint64_t size, uint64_t id,
                                uint64_t* address) {
  const uint64_t unit = size < kGranularity ? kBlockAlignment : kGranularity;
  if (size > UINT64_MAX - kGranularity) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t bytes = (size + unit - 1) / unit * unit;
  uint64_t at = bytes < kGranularity ? room_in_chunks(device->ordinal(), bytes) : 0;
  if (at == 0) {
    auto memory = device->create(std::max(bytes, kGranularity), id, CUmemAllocationProp{});
    if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult added = add_chunk(std::move(memory), &at);
    if (added != CUDA_SUCCESS) return added;
  }
  const auto chunk = find_chunk(at);
  Mapping block;
  block.range = {at, bytes};
  block.memory = chunk->second;
  block.offset = at - chunk->first;
  block.id = id;
  block.from_alloc = true;
  mappings_.emplace(at, std::move(block));
  ++block_count_;
  *address = at;
  return CUDA_SUCCESS;
}

uint64_t AddressSpace::room_in_chunks(int device, uint64_t size) const {
  for (const auto& [address, memory] : chunks_) {
    if (memory->ordinal() != device) continue;
    const uint64_t end = address + memory->size();
    uint64_t at = address;
    for (auto block = mappings_.lower_bound(at); at + size <= end; ++block) {
      if (block == mappings_.end() || block->first >= at + size) return at;
      at = block->second.range.end();
    }
  }
  return 0;
}

CUresult AddressSpace::add_chunk(std::shared_ptr<PhysicalMemory> memory, uint64_t* address) {
  const Range range{map_nothing(memory->size(), kGranularity, 0), memory->size()};
  if (range.address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (mmap(pointer(range.address), range.size, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory->fd(),
           static_cast<off_t>(memory->offset())) == MAP_FAILED) {
    munmap(pointer(range.address), range.size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  chunks_.emplace(range.address, std::move(memory));
  *address = range.address;
  return CUDA_SUCCESS;
}

AddressSpace::Chunks::const_iterator AddressSpace::find_chunk(uint64_t address) const {
  auto at = chunks_.upper_bound(address);
  if (at == chunks_.begin()) return chunks_.end();
  --at;
  return address < at->first + at->second->size() ? at : chunks_.end();
}

CUresult AddressSpace::free_block(uint64_t address) {
  auto found = mappings_.find(address);
  if (found == mappings_.end() || !found->second.from_alloc) return CUDA_ERROR_INVALID_VALUE;
  mappings_.erase(found);
  --block_count_;
  const auto chunk = find_chunk(address);
  const Range range{chunk->first, chunk->second->size()};
  if (is_unmapped(range)) {
    munmap(pointer(range.address), range.size);
    chunks_.erase(chunk);
  }
  return CUDA_SUCCESS;
}

void AddressSpace::free_blocks_of(int device) {
  std::vector<uint64_t> found;
  for (const auto& [address, mapping] : mappings_) {
    if (mapping.from_alloc && mapping.memory->ordinal() == device) found.push_back(address);
  }
  for (uint64_t address : found) free_block(address);
}

const Mapping* AddressSpace::find(uint64_t address) const {
  auto at = mappings_.upper_bound(address);
  if (at == mappings_.begin()) return nullptr;
  --at;
  return address < at->second.range.end() ? &at->second : nullptr;
}

bool AddressSpace::pieces(Range range, int device, bool write, std::vector<Piece>* out) const {
  out->clear();
  if (range.end() < range.address) return false;
  uint64_t at = range.address;
  while (at < range.end()) {
    const Mapping* mapping = find(at);
    if (mapping == nullptr || !mapping->allows(device, write)) return false;
    const uint64_t end = std::min(mapping->range.end(), range.end());
    out->push_back({mapping->memory, mapping->offset + at - mapping->range.address, end - at});
    at = end;
  }
  return true;
}

Range AddressSpace::reservation(uint64_t address) const {
  auto at = reservations_.upper_bound(address);
  if (at == reservations_.begin()) return {};
  --at;
  return address < at->first + at->second ? Range{at->first, at->second} : Range{};
}

bool AddressSpace::owns(uint64_t address) const {
  return reservation(address).size != 0 || find_chunk(address) != chunks_.end();
}

}  // namespace memsaver::sim
