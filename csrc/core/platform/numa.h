// numa: places host memory near a device.
//
// The placement is only a preference: it has no effect if the system has only one node, does not
// report its nodes, or rejects the preference.
#pragma once

#include <cstdint>
#include <string>

namespace memsaver {

// Returns the NUMA node of the PCI device with this bus id, which has the driver's format
// ("0000:1A:00.0"). Returns -1 if the system has a single node or does not report the node. Reads
// files. Any thread.
int numa_node_of_pci(const std::string& bus_id);

// Makes `node` the preferred node for those pages of [start, start + bytes) that are not yet
// allocated. `start` must be page-aligned. If the node is full, pages are allocated on other nodes.
// Does nothing if `node` is -1. Any thread.
void prefer_node(void* start, uint64_t bytes, int node) noexcept;

}  // namespace memsaver
