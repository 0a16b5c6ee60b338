#include "core/platform/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cctype>
#include <climits>
#include <cstdlib>

#include "core/platform/system_files.h"

namespace memsaver {
namespace {

// From linux/mempolicy.h, which not every system has installed.
constexpr int kPreferred = 1;

constexpr int kMostNodes = 1024;  // CONFIG_NODES_SHIFT is at most 10

}  // namespace

int numa_node_of_pci(const std::string& bus_id) {
  // A list such as "0" or "0-1"; a single number means a single node.
  const std::string nodes = read_system_file("/sys/devices/system/node/online").value_or("");
  if (nodes.find_first_of(",-") == std::string::npos) return -1;
  std::string name;
  for (const char letter : bus_id) {
    name += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  const std::string text =
      read_system_file("/sys/bus/pci/devices/" + name + "/numa_node").value_or("");
  if (text.empty() || text[0] < '0' || text[0] > '9') return -1;
  const unsigned long node = std::strtoul(text.c_str(), nullptr, 10);
  return node < kMostNodes ? static_cast<int>(node) : -1;
}

void prefer_node(void* start, uint64_t bytes, int node) noexcept {
  if (node < 0 || node >= kMostNodes) return;
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  unsigned long mask[kMostNodes / kBits + 1] = {};
  mask[node / kBits] |= 1ul << (node % kBits);
  // The kernel reads one bit less than the given count.
  syscall(SYS_mbind, start, bytes, kPreferred, mask, kMostNodes + 1, 0);
}

}  // namespace memsaver
