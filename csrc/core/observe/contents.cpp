#include "core/observe/contents.h"

#include <algorithm>
#include <map>

#include "core/driver/driver.h"
#include "core/memory/allocation.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

Error not_device_memory(const Range& range, const std::string& reason) {
  return Error(
      Status::kInvalidArgument,
      "there is no device memory of " + format_bytes(range.bytes) + " to fingerprint: " + reason);
}

// Returns the device of foreign memory.
int device_of_foreign(const Range& range) {
  unsigned int type = 0;
  if (driver().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, range.address) !=
          CUDA_SUCCESS ||
      type == CU_MEMORYTYPE_HOST) {
    throw not_device_memory(range,
                            "the driver does not report it as GPU memory; for host memory, "
                            "use any hash");
  }
  CUdeviceptr start = 0;
  size_t bytes = 0;
  int ordinal = 0;
  CU_CHECK(cuPointerGetAttribute, &start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, range.address);
  CU_CHECK(cuPointerGetAttribute, &bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, range.address);
  CU_CHECK(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, range.address);
  if (range.end() > start + bytes) {
    throw not_device_memory(range, "the allocation ends " +
                                       format_bytes(start + bytes - range.address) +
                                       " after the address");
  }
  return ordinal;
}

// Throws unless all ranges of a pool lie in live allocations of a mapped tag. Requires the lock.
void require_live(const Pool& pool, const std::vector<Range>& ranges) {
  const std::string name = quoted(pool.tag.name);
  if (pool.tag.state != State::kMapped) {
    throw Error(Status::kInvalidState,
                "tag " + name + " is " + name_of(pool.tag.state) +
                    ": there are no contents to fingerprint; resume it first")
        .with_tag(pool.tag.name);
  }
  uint64_t outside = 0;
  for (const Range& range : ranges) {
    const uint64_t more = range.bytes - total(pool.heap.live_within(range));
    outside += std::min(more, UINT64_MAX - outside);
  }
  if (outside != 0) {
    throw Error(Status::kInvalidState, format_bytes(outside) +
                                           " of the memory to fingerprint are in no live "
                                           "allocation of tag " +
                                           name)
        .with_tag(pool.tag.name);
  }
}

}  // namespace

std::vector<Digest> fingerprints(const std::vector<Range>& ranges) {
  std::map<Pool*, std::vector<Range>> ours;
  std::vector<Tag*> tags;
  for (const Range& range : ranges) {
    if (range.bytes == 0) continue;
    if (range.end() < range.address) {
      throw Error(Status::kInvalidArgument, "a range to fingerprint ends beyond all addresses");
    }
    Pool* const pool = Registry::owner(range.address);
    if (!pool) continue;
    ours[pool].push_back(range);
    if (std::find(tags.begin(), tags.end(), &pool->tag) == tags.end()) tags.push_back(&pool->tag);
  }
  Hold hold(std::unique_lock<std::mutex>(Registry::instance().mutex), tags);
  for (const auto& [pool, own] : ours) require_live(*pool, own);
  hold.unlock();

  struct Job {
    std::vector<Range> pieces;
    std::vector<size_t> rows;  // the result row of each piece
  };
  std::map<int, Job> jobs;  // by device
  size_t count = 0;
  for (const Range& range : ranges) {
    if (range.bytes == 0) continue;
    Pool* const pool = Registry::owner(range.address);
    Job& job = jobs[pool ? pool->heap.device().ordinal() : device_of_foreign(range)];
    for (uint64_t at = range.address; at < range.end(); at += kFingerprintBytes) {
      job.pieces.push_back({at, std::min(kFingerprintBytes, range.end() - at)});
      job.rows.push_back(count++);
    }
  }

  std::vector<Digest> rows(count);
  for (const auto& [ordinal, job] : jobs) {
    Device& device = Device::get(ordinal);
    DeviceScope scope(device);
    device.drain();
    Fingerprinter fingerprinter(device);
    fingerprinter.start(job.pieces);
    for (size_t i = 0; i < job.rows.size(); ++i) rows[job.rows[i]] = fingerprinter.wait(i);
  }
  return rows;
}

}  // namespace memsaver
