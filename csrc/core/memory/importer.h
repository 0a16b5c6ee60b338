// importer: the record of another process that maps memory of this process's tags.
//
// A tag is not paused while another process has imported any of its memory. The driver itself keeps
// imported memory allocated until the last importer has released it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/memory/registry.h"

namespace memsaver {

// The record of one process that imports memory. Any thread may use it.
class Importer {
 public:
  static std::unique_ptr<Importer> open(int64_t pid);
  // Ends the record. The process must have released all imported memory or have exited.
  ~Importer();
  Importer(const Importer&) = delete;
  Importer& operator=(const Importer&) = delete;

  int64_t pid() const { return pid_; }

  // Records that the process has released the pieces with these ids. Ignores unknown ids.
  void released(const uint64_t* ids, size_t count) noexcept;

  // The functions below require the registry's lock.

  bool has(uint64_t id) const { return pieces_.count(id) > 0; }
  // Records that the process has imported a piece of a tag's memory. If this function throws
  // std::bad_alloc, nothing has changed.
  void add(uint64_t id, Tag& tag, uint64_t bytes);
  void forget(uint64_t id) noexcept;
  // Returns the number of bytes that the process has imported from each tag.
  const std::map<Tag*, uint64_t>& bytes() const { return bytes_; }

 private:
  struct Piece {
    Tag* tag;
    uint64_t bytes;
  };

  explicit Importer(int64_t pid) : pid_(pid) {}

  const int64_t pid_;
  std::map<uint64_t, Piece> pieces_;  // by the id under which the memory was exported
  std::map<Tag*, uint64_t> bytes_;
};

// Returns whether another process has imported memory of one of the tags. Requires the
// registry's lock.
bool is_imported(const std::vector<Tag*>& tags) noexcept;

// Waits until a transition of `all` can begin (Need::kTransition) and no process has imported
// memory of `out`. `lock` is the registry's lock, which is locked on return. Requests the release
// of memory that importers keep only for later imports. Errors: kTagShared if the wait exceeds the
// option importer_seconds (the message lists the processes and their bytes); kInvalidState under
// the same conditions as in wait_for_tags().
void wait_for_importers(std::unique_lock<std::mutex>& lock, const std::vector<Tag*>& all,
                        const std::vector<Tag*>& out);

// Returns an eventfd that becomes readable when importers should release memory that no tensor
// uses, because a pause is waiting for the importers or the memory was freed. Every call returns
// the same eventfd. Throws kOutOfHostMemory if no file descriptor is available.
int release_requests();
// Makes the eventfd of release_requests() readable, if it exists. Any thread.
void request_release() noexcept;

}  // namespace memsaver
