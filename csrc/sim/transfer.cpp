#include "transfer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "state.h"

namespace memsaver::sim {
namespace {

constexpr uint64_t kBufferBytes = 256 << 10;

char* host(uint64_t address) { return reinterpret_cast<char*>(address); }

// Copies within this process. Returns false if either side is not accessible memory. Needs no
// descriptor, and the limit on file sizes does not apply. If the system forbids process_vm_readv, a
// bad address faults instead.
bool copy_memory(char* to, const char* from, uint64_t size) {
  while (size > 0) {
    const iovec local{to, size}, remote{const_cast<char*>(from), size};
    const ssize_t done = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (done < 0 && (errno == EPERM || errno == ENOSYS)) {
      std::memcpy(to, from, size);
      return true;
    }
    if (done <= 0) return false;
    to += done;
    from += done;
    size -= static_cast<uint64_t>(done);
  }
  return true;
}

// Writes to a file through a mapping, to which the limit on file sizes does not apply.
bool write_mapped(int fd, uint64_t position, const char* from, uint64_t size) {
  const uint64_t before = position % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  void* const window = mmap(nullptr, before + size, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                            static_cast<off_t>(position - before));
  if (window == MAP_FAILED) return false;
  const bool fine = copy_memory(static_cast<char*>(window) + before, from, size);
  munmap(window, before + size);
  return fine;
}

bool write_file(int fd, uint64_t position, const char* from, uint64_t size) {
  while (size > 0) {
    const ssize_t done = pwrite(fd, from, size, static_cast<off_t>(position));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EFBIG) return write_mapped(fd, position, from, size);
    if (done <= 0) return false;
    from += done;
    position += static_cast<uint64_t>(done);
    size -= static_cast<uint64_t>(done);
  }
  return true;
}

bool read_file(int fd, uint64_t position, char* to, uint64_t size) {
  while (size > 0) {
    const ssize_t done = pread(fd, to, size, static_cast<off_t>(position));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    to += done;
    position += static_cast<uint64_t>(done);
    size -= static_cast<uint64_t>(done);
  }
  return true;
}

bool is_zero(const std::vector<char>& buffer, uint64_t size) {
  return buffer[0] == 0 && std::memcmp(buffer.data(), buffer.data() + 1, size - 1) == 0;
}

bool punch(int fd, uint64_t position, uint64_t size) {
  return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(position),
                   static_cast<off_t>(size)) == 0;
}

bool copy_on_device(int to, uint64_t to_at, int from, uint64_t from_at, uint64_t size) {
  std::vector<char> buffer(std::min(size, kBufferBytes));
  while (size > 0) {
    const uint64_t step = std::min<uint64_t>(size, buffer.size());
    if (!read_file(from, from_at, buffer.data(), step)) return false;
    // Zeros need no memory: a copy of untouched memory allocates none.
    const bool fine =
        is_zero(buffer, step) ? punch(to, to_at, step) : write_file(to, to_at, buffer.data(), step);
    if (!fine) return false;
    to_at += step;
    from_at += step;
    size -= step;
  }
  return true;
}

bool copy_piece(const Span& to, uint64_t to_at, const Span& from, uint64_t from_at, uint64_t size) {
  if (to.memory != nullptr && from.memory != nullptr) {
    return copy_on_device(to.memory->fd(), to_at, from.memory->fd(), from_at, size);
  }
  if (to.memory != nullptr) return write_file(to.memory->fd(), to_at, host(from_at), size);
  if (from.memory != nullptr) return read_file(from.memory->fd(), from_at, host(to_at), size);
  return false;
}

}  // namespace

bool resolve(const Range& range, int device, bool write, std::vector<Span>* spans) {
  spans->clear();
  const AddressSpace& space = state().space;
  if (!space.owns(range.address)) {
    spans->push_back({nullptr, range.address, range.size});
    return true;
  }
  std::vector<Piece> pieces;
  if (!space.pieces(range, device, write, &pieces)) return false;
  for (Piece& piece : pieces) {
    const uint64_t position = piece.memory->offset() + piece.offset;
    spans->push_back({std::move(piece.memory), position, piece.size});
  }
  return true;
}

bool copy(const std::vector<Span>& destination, const std::vector<Span>& source) {
  size_t to = 0, from = 0;
  uint64_t to_done = 0, from_done = 0;
  while (to < destination.size() && from < source.size()) {
    const Span& into = destination[to];
    const Span& out_of = source[from];
    const uint64_t step = std::min(into.size - to_done, out_of.size - from_done);
    if (!copy_piece(into, into.position + to_done, out_of, out_of.position + from_done, step)) {
      return false;
    }
    to_done += step;
    from_done += step;
    if (to_done == into.size) ++to, to_done = 0;
    if (from_done == out_of.size) ++from, from_done = 0;
  }
  return true;
}

bool fill(const std::vector<Span>& destination, uint32_t value, unsigned width) {
  const bool zero = (width == 1 ? value & 0xff : value) == 0;
  uint64_t most = 0;
  for (const Span& span : destination) most = std::max(most, span.size);
  std::vector<char> pattern(zero ? 0 : std::min(most, kBufferBytes));
  if (!pattern.empty()) std::memcpy(pattern.data(), &value, width);
  for (size_t at = width; at < pattern.size(); at *= 2) {
    std::memcpy(&pattern[at], pattern.data(), std::min(at, pattern.size() - at));
  }
  for (const Span& span : destination) {
    if (span.memory == nullptr) return false;
    const int fd = span.memory->fd();
    if (zero) {
      if (!punch(fd, span.position, span.size)) return false;
      continue;
    }
    for (uint64_t done = 0; done < span.size; done += pattern.size()) {
      const uint64_t step = std::min<uint64_t>(pattern.size(), span.size - done);
      if (!write_file(fd, span.position + done, pattern.data(), step)) return false;
    }
  }
  return true;
}

bool fetch(const std::vector<Span>& source, void* buffer) {
  char* to = static_cast<char*>(buffer);
  for (const Span& span : source) {
    const bool fine = span.memory == nullptr
                          ? copy_memory(to, host(span.position), span.size)
                          : read_file(span.memory->fd(), span.position, to, span.size);
    if (!fine) return false;
    to += span.size;
  }
  return true;
}

bool store(const void* buffer, const std::vector<Span>& destination) {
  const char* from = static_cast<const char*>(buffer);
  for (const Span& span : destination) {
    const bool fine = span.memory == nullptr
                          ? copy_memory(host(span.position), from, span.size)
                          : write_file(span.memory->fd(), span.position, from, span.size);
    if (!fine) return false;
    from += span.size;
  }
  return true;
}

}  // namespace memsaver::sim
