// Control interface of the simulated CUDA driver (libmemsaver_sim.so).
//
// The library exports the CUDA driver's names and behaves like the driver of a machine with at most
// SIM_MAX_DEVICES GPUs. The functions below control the library and report its state. The interface
// is plain C without CUDA types. Sizes are in bytes. Every function may be called on any thread.
// Functions without a device argument may be called even before cuInit. No function waits for work
// in progress. In a forked child of an initialized process, the functions do nothing and return -1
// or 0, and every driver call returns CUDA_ERROR_NOT_INITIALIZED.
//
// The driver calls return the same results as an H200's driver (tests/conformance), with these
// intended differences:
//   - For a handle that was destroyed or never existed, the simulator returns
//     CUDA_ERROR_INVALID_VALUE or CUDA_ERROR_INVALID_HANDLE; the real driver reads freed memory and
//     may crash.
//   - The host can access device memory while the memory is mapped and accessible; any other host
//     access faults. sim_explain_host_faults explains such a fault.
//   - A mapping must be inside its reservation; the real driver was observed to map beyond the
//     reservation.
//   - Every module has one kernel, regardless of its code: memsaver's own ms_fingerprint. The
//     kernel runs on the CPU and supports only the launch geometry that memsaver uses.
//
// The first cuInit reads these environment variables; if a value is invalid, cuInit returns
// CUDA_ERROR_INVALID_VALUE:
//   - MEMSAVER_SIM_DEVICES is the number of devices, from 0 to SIM_MAX_DEVICES; the default is 1.
//     If it is 0, cuInit returns CUDA_ERROR_NO_DEVICE.
//   - MEMSAVER_SIM_MEMORY is the memory of each device: a number of bytes with an optional suffix
//     KiB, MiB, GiB or TiB, rounded down to a multiple of 2 MiB; the default is 80GiB.
//   - MEMSAVER_SIM_FAULTS is a comma-separated list of call:nth:code[:times], with the meanings
//     that sim_fail defines.
// If cuInit fails, sim_settings_problem returns the reason.
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

// Copies the reason for the failure of cuInit into buffer, truncated to size and zero-terminated.
// The text names an environment variable and its valid values, or a system error and any limit of
// the process that caused it. Returns the length of the full text, or 0 if cuInit has not failed.
int sim_settings_problem(char* buffer, size_t size);

// Makes the nth call (1: the next one) of the driver function `call`, and the times-1 calls after
// it (times 0: every later call), return `code` without any effect. `call` is the plain name
// ("cuMemCreate", not "cuMemAlloc_v2"). Several faults may be set for one name; each fault counts
// every call. Returns 0, or -1 if the simulated driver has no such function or nth is 0.
int sim_fail(const char* call, uint64_t nth, int code, uint64_t times);
// Like sim_fail, but returns the fault's number for sim_end_fault, or -1.
int64_t sim_begin_fault(const char* call, uint64_t nth, int code, uint64_t times);
// Removes the fault with this number, if it still exists.
void sim_end_fault(int64_t number);
// Removes all faults, including those from the environment.
void sim_clear_faults(void);
// Returns the number of calls of the driver function `call` so far, including failed calls, or 0 if
// the name is unknown.
uint64_t sim_calls(const char* call);

// Fills *totals. Returns 0. In a forked child, returns -1 and sets all fields to 0.
int sim_counts(struct sim_totals* totals);

// Copies entry `index` of the list of violations and illegal accesses into buffer, truncated to
// size and zero-terminated. Returns the length of the full text, or -1 if `index` is past the end.
// The list contains the first 1000 entries. Violations are calls that remove memory from work in
// progress. One kind is a cuMemUnmap of a range that queued or running operations access. Another
// kind is a cuMemFree, cuMemFreeHost or cuMemHostUnregister of a range that new work accesses:
// these functions wait for all work submitted earlier to the device, and the new work was submitted
// during this wait. Illegal accesses are operations on memory that was unmapped or inaccessible
// when the operations ran.
int sim_violation(uint64_t index, char* buffer, size_t size);
// Empties the list of violations and illegal accesses, sets both counts to 0, and restores contexts
// after illegal accesses.
void sim_clear_violations(void);

// Sets the device memory used by "another process". If the value exceeds the free memory, 0 bytes
// are free. Returns 0, or -1 for an unknown device.
int sim_occupy(int device, uint64_t bytes);
// Sets the granularity of device memory (cuMemGetAllocationGranularity), before cuInit: 2 MiB by
// default, as on GPUs. Smaller pages speed up tests that repeatedly copy a few pages. Returns 0, or
// -1 after cuInit or if `bytes` is not a power of two from the system's page size to 2 MiB.
int sim_granularity(uint64_t bytes);
// If `possible` is 0, no device can access another (cuDeviceCanAccessPeer); if it is 1, the
// default, all devices can.
void sim_peer_access(int possible);
// Limits the sum of pinned and registered host memory (default: no limit). Above the limit,
// cuMemHostAlloc and cuMemHostRegister return CUDA_ERROR_OUT_OF_MEMORY.
void sim_host_limit(uint64_t bytes);

// These functions copy between `buffer` and device or host memory at an address. Access is checked
// as for the program's own accesses, but the copy uses the device's file and maps no pages. The
// functions return 0, or -1 if a byte is not accessible; in that case, the bytes before it may have
// been copied.
int sim_read(uint64_t address, void* buffer, uint64_t size);
int sim_write(uint64_t address, const void* buffer, uint64_t size);

// Delays the start of every copy, memset, launch and host function (default 0).
void sim_stream_delay(uint64_t microseconds);
// Makes each copy take at least its size divided by this rate (in bytes per second; default 0: no
// limit).
void sim_copy_rate(uint64_t bytes_per_second);
// If `held` is 1, no stream starts another operation, and calls that wait for work keep waiting. If
// it is 0, the streams continue.
void sim_hold_streams(int held);
// Prevents operations that read or write any of the `bytes` bytes at `address` from starting, and
// therefore also all later operations in the same streams. Each call replaces the range of the
// previous call; if `bytes` is 0, no range is held.
void sim_hold_memory(uint64_t address, uint64_t bytes);

// If `gone` is 1, every later driver call returns CUDA_ERROR_DEINITIALIZED, as at process exit
// after the driver's own teardown. If `gone` is 0, calls work again. The driver's state is kept.
void sim_deinitialize(int gone);

// The type of a function that returns the tag of the paused memory at an address, zero-terminated,
// or null if the address is not in paused memory. The function is called in a signal handler on any
// thread, so it may make only async-signal-safe calls.
typedef const char* (*sim_paused_tag)(uint64_t address);

// Installs a SIGSEGV handler. If a host access faults at an address for which `paused_tag` returns
// a tag, the handler writes a line with the address and the tag to stderr. The handler then
// restores the action that it replaced, so that the fault repeats and triggers that action. For
// other faults, and for signals that a process sent, the handler writes no line. The library that
// contains `paused_tag` stays loaded. Only the first call has an effect.
void sim_explain_host_faults(sim_paused_tag paused_tag);

#ifdef __cplusplus
}
#endif

#endif  // MEMSAVER_SIM_SIM_H_
