#include "core/memory/importer.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include "core/memory/reservation.h"
#include "core/platform/options.h"
#include "core/platform/text.h"

namespace memsaver {
namespace {

std::atomic<int> requests{-1};

Error shared_error(const std::vector<Tag*>& tags) {
  std::string text;
  std::string first;
  uint64_t total_bytes = 0;
  for (const Importer* importer : Registry::instance().importers) {
    for (const auto& [tag, bytes] : importer->bytes()) {
      if (std::find(tags.begin(), tags.end(), tag) == tags.end()) continue;
      if (first.empty()) first = tag->name;
      total_bytes += bytes;
      if (text.size() < 400) {
        text += (text.empty() ? "" : ", ") + std::string("process ") +
                std::to_string(importer->pid()) + " (" + format_bytes(bytes) + " of " +
                quoted(tag->name) + ")";
      }
    }
  }
  Error error(Status::kTagShared,
              "tag " + quoted(first) +
                  " cannot be paused while other processes use its tensors: " + text +
                  " did not release them within option importer_seconds; delete the tensors there "
                  "first, or raise the option");
  error.tag = first;
  error.needed_bytes = total_bytes;
  return error;
}

}  // namespace

std::unique_ptr<Importer> Importer::open(int64_t pid) {
  std::unique_ptr<Importer> made(new Importer(pid));
  std::lock_guard<std::mutex> lock(Registry::instance().mutex);
  Registry::instance().importers.push_back(made.get());
  return made;
}

Importer::~Importer() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<Importer*>& all = registry.importers;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
  registry.changed.notify_all();
}

void Importer::released(const uint64_t* ids, size_t count) noexcept {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (size_t i = 0; i < count; ++i) forget(ids[i]);
  registry.changed.notify_all();
}

void Importer::add(uint64_t id, Tag& tag, uint64_t bytes) {
  uint64_t& total = bytes_[&tag];
  try {
    pieces_.emplace(id, Piece{&tag, bytes});
  } catch (...) {
    if (total == 0) bytes_.erase(&tag);
    throw;
  }
  total += bytes;
}

void Importer::forget(uint64_t id) noexcept {
  const auto piece = pieces_.find(id);
  if (piece == pieces_.end()) return;
  const auto total = bytes_.find(piece->second.tag);
  total->second -= piece->second.bytes;
  if (total->second == 0) bytes_.erase(total);
  pieces_.erase(piece);
}

bool is_imported(const std::vector<Tag*>& tags) noexcept {
  for (const Importer* importer : Registry::instance().importers) {
    for (Tag* tag : tags) {
      if (importer->bytes().count(tag)) return true;
    }
  }
  return false;
}

void wait_for_importers(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& all,
                        const std::vector<Tag*>& out) {
  Deadline deadline;
  for (;;) {
    wait_for_tags(lock, all, Need::kTransition);
    if (!is_imported(out)) return;
    const auto now = std::chrono::steady_clock::now();
    if (!deadline) deadline = now + time_option(Option::importer_seconds);
    if (now >= *deadline) throw shared_error(out);
    request_release();
    wait_for_a_change(lock, out, *deadline);
  }
}

int release_requests() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (requests.load() < 0) {
    const int made = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made < 0) {
      Error error(Status::kOutOfHostMemory,
                  std::string("no eventfd could be created: ") + std::strerror(errno));
      error.os_error = errno;
      throw error;
    }
    requests.store(made);
  }
  return requests.load();
}

void request_release() noexcept {
  const int descriptor = requests.load();
  if (descriptor >= 0) eventfd_write(descriptor, 1);
}

}  // namespace memsaver
