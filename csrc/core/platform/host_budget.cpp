#include "core/platform/host_budget.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "core/platform/options.h"
#include "core/platform/status.h"
#include "core/platform/system_files.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

// The mutex serializes claims, so that no two claims get the same memory. It is locked while files
// are read, but never while memory is touched.
std::mutex mutex;
std::atomic<uint64_t> claimed_bytes{0};    // changed under the mutex
std::atomic<uint64_t> untouched_bytes{0};  // part of claimed_bytes; changed under the mutex
std::atomic<uint64_t> outside_bytes{0};    // the bytes of claims outside the budget

// The available memory, and the limit that determines it.
struct Available {
  uint64_t bytes = UINT64_MAX;
  std::string limit = "nothing";

  void at_most(uint64_t limit_bytes, const std::string& who) {
    if (limit_bytes >= bytes) return;
    bytes = limit_bytes;
    limit = who;
  }
};

uint64_t less(uint64_t bytes, uint64_t taken) { return bytes > taken ? bytes - taken : 0; }

uint64_t margin(uint64_t total) { return std::max<uint64_t>(total / 50, 256ull << 20); }

void consider_group(const Cgroup& group, Available& available) {
  const std::string stat = group.read("memory.stat").value_or("");
  const char* const usage_file = group.unified ? "memory.current" : "memory.usage_in_bytes";
  const uint64_t cache =
      number_after(stat, group.unified ? "inactive_file" : "total_inactive_file").value_or(0) +
      number_after(stat, group.unified ? "active_file" : "total_active_file").value_or(0);
  const std::optional<uint64_t> usage = group.number(usage_file);
  if (!usage) return;
  const auto consider = [&](const char* file) {
    const std::optional<uint64_t> limit = group.number(file);
    if (!limit) return;
    available.at_most(less(less(*limit, less(*usage, cache)), margin(*limit)),
                      group.directory + "/" + file + ", which is " + format_bytes(*limit));
  };
  if (group.unified) {
    consider("memory.max");
    consider("memory.high");  // above it, processes are slowed down, not killed
  } else {
    consider("memory.limit_in_bytes");
  }
}

Available ask_system() {
  Available available;
  const std::string meminfo = read_system_file("/proc/meminfo").value_or("");
  if (const std::optional<uint64_t> kib = number_after(meminfo, "MemAvailable")) {
    const uint64_t total = number_after(meminfo, "MemTotal").value_or(*kib) << 10;
    available.at_most(
        less(*kib << 10, margin(total)),
        "the system's memory (MemAvailable in /proc/meminfo is " + format_bytes(*kib << 10) + ")");
  }
  for (const Cgroup& group : cgroups_of("memory")) consider_group(group, available);
  if (available.bytes != UINT64_MAX) available.bytes = less(available.bytes, untouched_bytes);
  return available;
}

const char* name_of(HostUse use) {
  return use == HostUse::kBackup ? "a backup" : "a staging buffer";
}

[[noreturn]] void refuse(uint64_t bytes, uint64_t free, HostUse use, const std::string& limit,
                         const std::string& remedy) {
  Error error(Status::kOutOfHostMemory,
              std::string(name_of(use)) + " needs " + format_bytes(bytes) +
                  " of host memory, and " + format_bytes(free) + " are available: the limit is " +
                  limit + ", and backups use " + format_bytes(claimed_bytes) + "; " + remedy +
                  (use == HostUse::kBackup ? ", or use backup='disk' or backup='none'" : ""));
  error.needed_bytes = bytes;
  error.free_bytes = free;
  throw error;
}

void claim(uint64_t bytes, HostUse use) {
  if (bytes == 0) return;
  const uint64_t most = option(Option::host_bytes);
  std::lock_guard<std::mutex> lock(mutex);
  if (most != 0 && bytes > less(most, claimed_bytes)) {
    refuse(bytes, less(most, claimed_bytes), use,
           "the option host_bytes (MEMSAVER_HOST_BYTES), which is " + format_bytes(most),
           "raise host_bytes, release memory with trim()");
  }
  const Available available = ask_system();
  if (available.bytes == UINT64_MAX && is_out_of_descriptors()) {
    Error error(Status::kOutOfHostMemory,
                std::string(name_of(use)) + " needs " + format_bytes(bytes) +
                    " of host memory, and the available memory is unknown because no file can be "
                    "opened; close files or raise their limit (ulimit -n)");
    error.needed_bytes = bytes;
    throw error;
  }
  if (bytes > available.bytes) {
    refuse(bytes, available.bytes, use, available.limit,
           "free host memory or raise that limit, release memory with trim()");
  }
  claimed_bytes += bytes;
  untouched_bytes += bytes;
}

}  // namespace

uint64_t host_available_bytes() { return ask_system().bytes; }

HostClaim HostClaim::take(uint64_t bytes, HostUse use) {
  HostClaim taken;
  taken.grow(bytes, use);
  return taken;
}

HostClaim HostClaim::outside_budget(uint64_t bytes) noexcept {
  HostClaim made;
  made.bytes_ = made.touched_bytes_ = bytes;
  made.in_budget_ = false;
  outside_bytes += bytes;
  return made;
}

HostClaim::HostClaim(HostClaim&& other) noexcept
    : bytes_(std::exchange(other.bytes_, 0)),
      touched_bytes_(std::exchange(other.touched_bytes_, 0)),
      in_budget_(other.in_budget_) {}

HostClaim& HostClaim::operator=(HostClaim&& other) noexcept {
  HostClaim taken(std::move(other));
  std::swap(bytes_, taken.bytes_);
  std::swap(touched_bytes_, taken.touched_bytes_);
  std::swap(in_budget_, taken.in_budget_);
  return *this;
}

HostClaim::~HostClaim() { shrink(bytes_); }

void HostClaim::grow(uint64_t bytes, HostUse use) {
  claim(bytes, use);
  bytes_ += bytes;
}

void HostClaim::touched(uint64_t bytes) noexcept {
  std::lock_guard<std::mutex> lock(mutex);
  const uint64_t more = std::min(bytes, bytes_ - touched_bytes_);
  touched_bytes_ += more;
  untouched_bytes -= more;
}

void HostClaim::shrink(uint64_t bytes) noexcept {
  const uint64_t of_touched = std::min(bytes, touched_bytes_);
  release(of_touched, std::min(bytes, bytes_) - of_touched);
}

void HostClaim::shrink_untouched(uint64_t bytes) noexcept {
  release(0, std::min(bytes, bytes_ - touched_bytes_));
}

HostClaim HostClaim::split(uint64_t bytes) noexcept {
  HostClaim other;
  other.in_budget_ = in_budget_;
  other.bytes_ = std::min(bytes, bytes_);
  other.touched_bytes_ = std::min(bytes, touched_bytes_);
  bytes_ -= other.bytes_;
  touched_bytes_ -= other.touched_bytes_;
  return other;
}

void HostClaim::release(uint64_t of_touched, uint64_t of_untouched) noexcept {
  if (of_touched + of_untouched == 0) return;
  bytes_ -= of_touched + of_untouched;
  touched_bytes_ -= of_touched;
  if (!in_budget_) {
    outside_bytes -= of_touched + of_untouched;
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  claimed_bytes -= of_touched + of_untouched;
  untouched_bytes -= of_untouched;
}

uint64_t HostClaim::claimed() noexcept { return claimed_bytes; }

uint64_t HostClaim::held() noexcept { return claimed_bytes + outside_bytes; }

}  // namespace memsaver
