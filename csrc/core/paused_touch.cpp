#include "core/paused_touch.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>

#include "core/driver.h"
#include "core/registry.h"

namespace memsaver {
namespace {

constexpr size_t kNameBytes = 200;  // of a tag, at most

struct sigaction before;  // what SIGSEGV did without us; written before the handler is there

// A line made without any allocation; what does not fit is left out.
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
  // On one line, without what a terminal would take for a command.
  void add_name(const std::string& name) {
    add('\'');
    size_t end = name.size();
    if (end > kNameBytes) {
      end = kNameBytes;
      while ((name[end] & 0xc0) == 0x80) --end;  // no part of a character
    }
    for (size_t i = 0; i < end; ++i) {
      const auto byte = static_cast<unsigned char>(name[i]);
      const bool c1 = byte == 0xc2 && static_cast<unsigned char>(name[i + 1]) < 0xa0;
      add(byte < 0x20 || byte == 0x7f || c1 ? '?' : name[i]);
      i += c1;
    }
    add(end < name.size() ? "...'" : "'");
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

void tell(uint64_t address) {
  const Pool* const pool = Registry::owner(address);
  if (!pool || pool->tag.accepting.load(std::memory_order_acquire)) return;
  Line line;
  line.add("memsaver: ");
  line.add_hex(address);
  line.add(" was touched, memory of tag ");
  line.add_name(pool->tag.name);
  line.add(", which is paused; resume it first: memsaver.resume(");
  line.add_name(pool->tag.name);
  line.add(")\n");
  line.write_to(STDERR_FILENO);
}

void on_fault(int number, siginfo_t* info, void*) {
  const int kept = errno;
  const bool sent = info->si_code <= 0;  // by a process, not by what this thread did
  if (!sent) tell(reinterpret_cast<uint64_t>(info->si_addr));
  sigaction(number, &before, nullptr);
  if (sent) raise(number);  // comes after this returns; a fault comes again by itself
  errno = kept;
}

// The handler's code must stay, whoever unloads the library.
bool stay_loaded() {
  Dl_info own{};
  return dladdr(reinterpret_cast<void*>(&on_fault), &own) != 0 && own.dli_fname &&
         dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) != nullptr;
}

}  // namespace

void tell_of_paused_touches() noexcept {
  static std::atomic<bool> done{false};
  const DriverTable* const driver = open_driver_table();
  if (!driver || !driver->simulated || done.exchange(true) || !stay_loaded()) return;
  struct sigaction ours{};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  if (sigaction(SIGSEGV, nullptr, &before) == 0) sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace memsaver
