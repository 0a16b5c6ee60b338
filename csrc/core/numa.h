// numa: which memory of the host lies near a device.
//
// A preference only: where the system has one node, does not say, or refuses, nothing happens.
#pragma once

#include <cstdint>
#include <string>

namespace memsaver {

// The NUMA node that a PCI device is attached to, by its bus id as the driver writes it
// ("0000:1A:00.0"); -1 where the system has a single node or does not say. Reads files; any thread.
int numa_node_of_pci(const std::string& bus_id);

// Prefers `node` for the pages of [start, start + bytes) that are not yet there; `start` lies on a
// page boundary. Pages come from other nodes when that one is full. Does nothing for node -1. Any
// thread.
void prefer_node(void* start, uint64_t bytes, int node) noexcept;

}  // namespace memsaver
