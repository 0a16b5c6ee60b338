#include "core/platform/log.h"

#include <deque>
#include <mutex>

namespace memsaver {
namespace {

constexpr size_t kKept = 64;

struct Queue {
  std::mutex mutex;
  std::deque<std::string> texts;
  size_t dropped = 0;
};

// Never destroyed: threads may still report while the process exits.
Queue& queue() {
  static Queue* const instance = new Queue;
  return *instance;
}

}  // namespace

void warn(const std::string& text) noexcept try {
  Queue& q = queue();
  std::lock_guard<std::mutex> lock(q.mutex);
  if (q.texts.size() < kKept) {
    q.texts.push_back(text);
  } else {
    ++q.dropped;
  }
} catch (...) {
}

bool next_warning(std::string* text) noexcept try {
  Queue& q = queue();
  std::lock_guard<std::mutex> lock(q.mutex);
  if (q.texts.empty()) {
    if (q.dropped == 0) return false;
    *text = std::to_string(q.dropped) + " more warnings were dropped";
    q.dropped = 0;
    return true;
  }
  *text = std::move(q.texts.front());
  q.texts.pop_front();
  return true;
} catch (...) {
  return false;
}

}  // namespace memsaver
