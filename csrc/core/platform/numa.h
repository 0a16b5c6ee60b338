// numa: places host memory near a device.
//
// The placement is only a preference: nothing happens if the system has one node, does not report
// its nodes, or rejects the preference.
#pragma once

#include <cstdint>
#include <string>

namespace memsaver {

// Returns the NUMA node of a PCI device, by its bus id as the driver writes it ("0000:1A:00.0"); -1
// if the system has a single node or does not report it. Reads files. Any thread.
int numa_node_of_pci(const std::string& bus_id);

// Prefers `node` for the pages of [start, start + bytes) that are not yet allocated; `start` is
// page-aligned. If the node is full, pages come from other nodes. Does nothing for node -1. Any
// thread.
void prefer_node(void* start, uint64_t bytes, int node) noexcept;

}  // namespace memsaver
