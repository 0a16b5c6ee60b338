// The single state of the simulated driver, and access to it.
//
// One mutex guards everything. Each call locks it, and unlocks it only while waiting for work or
// running it. The state is never destroyed, because streams may run until the process exits.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "address_space.h"
#include "capture.h"
#include "contexts.h"
#include "device_memory.h"
#include "diagnostics.h"
#include "faults.h"
#include "host_memory.h"
#include "kernels.h"
#include "streams.h"

namespace memsaver::sim {

struct Device {
  Device(int ordinal, uint64_t memory_bytes) : memory(ordinal, memory_bytes), context(ordinal) {}

  DeviceMemory memory;
  Context context;
};

// The object of a CUmemGenericAllocationHandle.
struct Handle {
  std::shared_ptr<PhysicalMemory> memory;
  uint64_t references = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;  // an operation was completed, or a stream closed or released

  bool initialized = false;
  bool settings_read = false;
  bool deinitialized = false;  // sim_deinitialize
  bool peer_access = true;     // sim_peer_access
  std::string settings_problem;
  std::vector<std::unique_ptr<Device>> devices;
  AddressSpace space;
  HostMemory host;
  Streams streams;
  Captures captures;
  Faults faults;
  Diagnostics diagnostics;
  std::map<CUmemGenericAllocationHandle, Handle> handles;
  std::map<CUevent, std::shared_ptr<Event>> events;
  std::map<CUgraph, Graph> graphs;
  std::map<CUgraphExec, Graph> executables;
  std::map<CUmodule, Module> modules;

  // Returns a value for a handle of any kind; never 0, 1 or 2, and unique in a process.
  uint64_t next_handle();
  Device* device(int ordinal);  // null for an unknown device
};

State& state();

// Returns whether this is a child forked after cuInit: its state is a copy, without the threads.
bool in_forked_child();

// Reads the environment and creates the devices, once. Needs the lock.
CUresult initialize();
// Reads only the environment's faults, so that cuInit itself can be made to fail.
CUresult read_environment();

}  // namespace memsaver::sim
