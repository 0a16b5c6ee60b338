// Control interface of the simulated CUDA driver (libmemsaver_sim.so).
//
// The library exports the CUDA driver's names and behaves like the driver of a machine with at most
// SIM_MAX_DEVICES GPUs. The functions below control it and report its state. Plain C, no CUDA
// types. Sizes are in bytes. Every function may be called on any thread, even before cuInit unless
// it names a device, and never waits for work in progress. In a forked child of an initialised
// process they do nothing and return -1 or 0, and every driver call there returns
// CUDA_ERROR_NOT_INITIALIZED.
//
// The driver calls return the same results as an H200's driver (tests/conformance), with these
// intended differences:
//   - A handle that was destroyed or never existed is an error, CUDA_ERROR_INVALID_VALUE or
//     CUDA_ERROR_INVALID_HANDLE; the driver reads freed memory, and may crash.
//   - The host can access device memory while it is mapped and accessible, and faults otherwise;
//     sim_explain_host_faults explains such a fault.
//   - A mapping must lie within its reservation; the driver was observed to map beyond it.
//   - Every module has one kernel, regardless of its code: memsaver's own ms_fingerprint. It runs
//     on the CPU, and only with the launch geometry that memsaver uses.
//
// These variables are read at the first cuInit; an invalid value makes cuInit return
// CUDA_ERROR_INVALID_VALUE:
//   MEMSAVER_SIM_DEVICES  number of devices, 0 to SIM_MAX_DEVICES, default 1 (0: cuInit returns
//                         CUDA_ERROR_NO_DEVICE)
//   MEMSAVER_SIM_MEMORY   memory of each device, default 80GiB; a number of bytes with an optional
//                         suffix KiB, MiB, GiB or TiB; rounded down to a multiple of 2 MiB
//   MEMSAVER_SIM_FAULTS   comma-separated call:nth:code[:times], each as in sim_fail
// sim_settings_problem returns the name of the invalid variable.
#ifndef MEMSAVER_SIM_SIM_H_
#define MEMSAVER_SIM_SIM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SIM_MAX_DEVICES = 16 };

// The simulated driver's objects at one moment, counted under one lock.
struct sim_totals {
  uint64_t handles;           // from cuMemCreate or cuMemRetainAllocationHandle, not fully released
  uint64_t mappings;          // cuMemMap without cuMemUnmap
  uint64_t reservations;      // cuMemAddressReserve without cuMemAddressFree
  uint64_t reserved_bytes;    // sum of their sizes
  uint64_t allocations;       // cuMemAlloc without cuMemFree
  uint64_t pinned_bytes;      // cuMemHostAlloc without cuMemFreeHost
  uint64_t registered_bytes;  // cuMemHostRegister without cuMemHostUnregister
  uint64_t streams;           // cuStreamCreate without cuStreamDestroy
  uint64_t events;            // cuEventCreate without cuEventDestroy
  uint64_t graphs;            // graphs and executable graphs not destroyed
  uint64_t modules;           // cuModuleLoadData without cuModuleUnload
  uint64_t captures;          // captures begun and not ended
  uint64_t retained_contexts;  // cuDevicePrimaryCtxRetain without Release, all devices
  uint64_t queued_operations;  // submitted and not completed, all streams
  uint64_t violations;         // see sim_violation
  uint64_t illegal_accesses;   // accesses without access rights, see sim_violation
  uint64_t devices;            // 0 before cuInit
  uint64_t physical_bytes[SIM_MAX_DEVICES];  // memory in use on each device, as in cuMemGetInfo
};

// Copies the reason why cuInit failed into buffer (truncated to size, zero-terminated): an
// environment variable and its valid values, or a limit of the process. Returns the length of the
// whole text, or 0 if cuInit has not failed.
int sim_settings_problem(char* buffer, size_t size);

// Makes the nth call (1: the next one) of the driver function `call`, and the times-1 calls after
// it (times 0: every later call), return `code` without any effect. `call` is the plain name
// ("cuMemCreate", not "cuMemAlloc_v2"). Several faults may be set for one name; each counts every
// call. Returns 0, or -1 if the simulated driver has no such function or nth is 0.
int sim_fail(const char* call, uint64_t nth, int code, uint64_t times);
// Like sim_fail, but returns a number for sim_end_fault, or -1.
int64_t sim_begin_fault(const char* call, uint64_t nth, int code, uint64_t times);
// Removes the fault with this number, if it still exists.
void sim_end_fault(int64_t number);
// Removes all faults, including those from the environment.
void sim_clear_faults(void);
// Returns the number of calls of that name so far, including failed calls; 0 if the name is
// unknown.
uint64_t sim_calls(const char* call);

// Fills *totals. Returns 0, or -1 in a forked child (*totals is then all zero).
int sim_counts(struct sim_totals* totals);

// Violations are calls that remove memory from work in progress: cuMemUnmap of a range that queued
// or running operations access; cuMemFree, cuMemFreeHost and cuMemHostUnregister (which wait for
// all work submitted earlier to the device) of a range that work submitted during that wait
// accesses. Illegal accesses are operations on memory that was unmapped or inaccessible when they
// ran. Both are kept in one list, the first 1000 as text. Copies entry `index` into buffer
// (truncated to size, zero-terminated) and returns the length of the whole text, or -1 past the
// end.
int sim_violation(uint64_t index, char* buffer, size_t size);
// Empties the list, sets both counts to 0, and restores contexts after illegal accesses.
void sim_clear_violations(void);

// Sets the device memory used by "another process". A value above the free memory leaves 0 free.
// Returns 0, or -1 for an unknown device.
int sim_occupy(int device, uint64_t bytes);
// Sets the granularity of device memory (cuMemGetAllocationGranularity), before cuInit: 2 MiB by
// default, as on GPUs. Smaller pages speed up tests that repeatedly copy a few pages. Returns 0,
// or -1 after cuInit or if it is not a power of two from the system's page size to 2 MiB.
int sim_granularity(uint64_t bytes);
// With 0, no device can access another (cuDeviceCanAccessPeer); with 1, the default, all can.
void sim_peer_access(int possible);
// Limits the sum of pinned and registered host memory (default: no limit); above it cuMemHostAlloc
// and cuMemHostRegister return CUDA_ERROR_OUT_OF_MEMORY.
void sim_host_limit(uint64_t bytes);

// Copy between `buffer` and device or host memory at an address. Access is checked as for the
// program's own accesses, but the copy goes through the device's file, which maps no pages. Return
// 0, or -1 if a byte is not accessible; the bytes before it may be copied.
int sim_read(uint64_t address, void* buffer, uint64_t size);
int sim_write(uint64_t address, const void* buffer, uint64_t size);

// Delays the start of every copy, set, launch and host function (default 0).
void sim_stream_delay(uint64_t microseconds);
// Makes copies take at least size / rate (bytes per second; default 0: no limit).
void sim_copy_rate(uint64_t bytes_per_second);
// With 1, no stream starts another operation, and calls that wait for work keep waiting; 0
// continues.
void sim_hold_streams(int held);
// Stops operations that read or write this memory, and all later operations of their streams.
// Replaces the range of the previous call; 0 bytes removes it.
void sim_hold_memory(uint64_t address, uint64_t bytes);

// 1: every later driver call returns CUDA_ERROR_DEINITIALIZED, as at process exit after the
// driver's own teardown; 0: calls work again. State is kept.
void sim_deinitialize(int gone);

// Returns the tag of the paused memory at an address, zero-terminated, or null for an address that
// is not paused memory. It is called in a signal handler on any thread, so it may make only
// async-signal-safe calls.
typedef const char* (*sim_paused_tag)(uint64_t address);

// After the first call, a host access to memory for which `paused_tag` returns a tag writes a
// line with the address and the tag to stderr: installs a SIGSEGV handler, which then restores
// the action that it replaced, so that the fault repeats and triggers that action. Other faults,
// and signals sent by a process, write no line. The library with `paused_tag` stays loaded. Later
// calls have no effect.
void sim_explain_host_faults(sim_paused_tag paused_tag);

#ifdef __cplusplus
}
#endif

#endif  // MEMSAVER_SIM_SIM_H_
