// The single state of the simulated driver, and functions that access it.
//
// One mutex guards the whole state. Each call locks the mutex and unlocks it only while it waits
// for work or runs work. The state is never destroyed, because streams may run until the process
// exits.
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

  // Returns a value for a handle of any kind. The value is unique in a process and is never 0, 1 or
  // 2.
  uint64_t next_handle();
  Device* device(int ordinal);  // null for an unknown device
};

State& state();

// Returns whether this process is a child that was forked after cuInit. Such a child has a copy of
// the state, but none of the threads.
bool in_forked_child();

// Creates the devices, unless they exist. Requires the lock and an earlier successful call of
// read_environment().
CUresult initialize();
// Reads the environment and adds its faults, unless an earlier call succeeded. Faults are added
// before initialize() so that a fault can apply to cuInit itself. Requires the lock.
CUresult read_environment();

}  // namespace memsaver::sim
