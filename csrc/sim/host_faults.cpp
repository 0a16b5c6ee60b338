#include "host_faults.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace memsaver::sim {
namespace {

constexpr size_t kNameBytes = 200;  // the longest part of a tag's name to write

// Written before the handler is installed:
struct sigaction before;  // the action of SIGSEGV that the handler replaced
sim_paused_tag find_tag;

// A line of text, built without an allocation. Text that does not fit is dropped.
class Line {
 public:
  void add(const char* text) {
    while (*text != '\0') add(*text++);
  }
  void add_hex(uint64_t value) {
    add("0x");
    int shift = 60;
    while (shift > 0 && value >> shift == 0) shift -= 4;
    for (; shift >= 0; shift -= 4) add("0123456789abcdef"[value >> shift & 15]);
  }
  // Replaces control characters, so that the name stays on one line and controls no terminal.
  void add_name(const char* name) {
    add('\'');
    const size_t size = std::strlen(name);
    size_t end = size;
    if (end > kNameBytes) {
      end = kNameBytes;
      while ((name[end] & 0xc0) == 0x80) --end;  // do not split a character
    }
    for (size_t i = 0; i < end; ++i) {
      const auto byte = static_cast<unsigned char>(name[i]);
      const bool c1 = byte == 0xc2 && static_cast<unsigned char>(name[i + 1]) < 0xa0;
      add(byte < 0x20 || byte == 0x7f || c1 ? '?' : name[i]);
      i += c1;
    }
    add(end < size ? "...'" : "'");
  }
  void write_to(int descriptor) const {
    size_t done = 0;
    while (done < size_) {
      const ssize_t written = write(descriptor, text_ + done, size_ - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;
      done += static_cast<size_t>(written);
    }
  }

 private:
  void add(char c) {
    if (size_ < sizeof(text_)) text_[size_++] = c;
  }

  size_t size_ = 0;
  char text_[1024];
};

void explain(uint64_t address) {
  const char* const tag = find_tag(address);
  if (!tag) return;
  Line line;
  line.add("memsaver: ");
  line.add_hex(address);
  line.add(" was touched, memory of tag ");
  line.add_name(tag);
  line.add(", which is paused; resume it first: memsaver.resume(");
  line.add_name(tag);
  line.add(")\n");
  line.write_to(STDERR_FILENO);
}

void on_fault(int number, siginfo_t* info, void*) {
  const int kept = errno;
  const bool sent = info->si_code <= 0;  // sent by a process, not caused by this thread
  if (!sent) explain(reinterpret_cast<uint64_t>(info->si_addr));
  sigaction(number, &before, nullptr);
  if (sent) raise(number);  // delivered after this function returns; a fault repeats by itself
  errno = kept;
}

// Keeps the library that contains this code loaded, even if a program closes it.
bool keep_loaded(const void* code) {
  Dl_info library{};
  return dladdr(code, &library) != 0 && library.dli_fname &&
         dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) != nullptr;
}

}  // namespace

void explain_host_faults(sim_paused_tag paused_tag) noexcept {
  static std::atomic<bool> done{false};
  if (done.exchange(true)) return;
  if (!keep_loaded(reinterpret_cast<const void*>(&on_fault)) ||
      !keep_loaded(reinterpret_cast<const void*>(paused_tag))) {
    return;
  }
  find_tag = paused_tag;
  struct sigaction ours{};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  if (sigaction(SIGSEGV, nullptr, &before) == 0) sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace memsaver::sim
