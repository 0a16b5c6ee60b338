// Control interface of the simulated CUDA driver (libmemsaver_sim.so).
//
// The library exports the CUDA driver's names and behaves like the driver of a machine with
// SIM_MAX_DEVICES or fewer GPUs; the functions below steer it and look inside. Plain C, no CUDA
// types. Sizes are bytes. Every function may be called from any thread, before cuInit too unless
// it names a device, and never waits for work in flight. In a forked child of an initialised
// process they do nothing and return -1 or 0, and every driver call there returns
// CUDA_ERROR_NOT_INITIALIZED.
//
// Its answers are those that the driver of an H200 gave (tests/conformance). It differs on purpose
// in these:
//   - A handle that was destroyed or never existed is an error, CUDA_ERROR_INVALID_VALUE or
//     CUDA_ERROR_INVALID_HANDLE; the driver reads freed memory, and may crash.
//   - The host can touch device memory while it is mapped and accessible, and faults otherwise.
//   - A mapping must end where its reservation does, or before; the driver was seen to map beyond.
//   - A module of whatever code has one kernel, memsaver's own ms_fingerprint, which runs on the
//     CPU, in the geometry that it was made for alone.
//
// Read from the environment at the first cuInit; a value that makes no sense makes cuInit return
// CUDA_ERROR_INVALID_VALUE:
//   MEMSAVER_SIM_DEVICES  number of devices, 0 to SIM_MAX_DEVICES, default 1 (0: cuInit returns
//                         CUDA_ERROR_NO_DEVICE)
//   MEMSAVER_SIM_MEMORY   memory of each device, default 80GiB; a number of bytes, or one with the
//                         suffix KiB, MiB, GiB or TiB; rounded down to 2 MiB
//   MEMSAVER_SIM_FAULTS   comma-separated call:nth:code[:times], each as in sim_fail
// sim_settings_problem says which variable that was.
#ifndef MEMSAVER_SIM_SIM_H_
#define MEMSAVER_SIM_SIM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SIM_MAX_DEVICES = 16 };

// What the simulated driver holds at one moment. All of it is taken under one lock.
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
  uint64_t illegal_accesses;   // operations that touched memory they could not, see sim_violation
  uint64_t devices;            // 0 before cuInit
  uint64_t physical_bytes[SIM_MAX_DEVICES];  // of each device, as cuMemGetInfo counts it
};

// Copies the reason why cuInit failed into buffer (cut to size, zero-terminated): an environment
// variable and its valid values, or a limit of the process. Returns the length of the whole text,
// or 0 if cuInit has not failed.
int sim_settings_problem(char* buffer, size_t size);

// Makes the nth call (1: the next one) of the driver function `call` return `code` without any
// effect, and the times-1 calls after it too (times 0: every later call). `call` is the plain name
// ("cuMemCreate", not "cuMemAlloc_v2"). Several faults may be set for one name; each counts every
// call. Returns 0, or -1 when the name is not one of the simulated driver's or nth is 0.
int sim_fail(const char* call, uint64_t nth, int code, uint64_t times);
// Forgets all faults, those from the environment included.
void sim_clear_faults(void);
// Calls of that name so far, failed ones included; 0 for an unknown name.
uint64_t sim_calls(const char* call);

// Fills *totals. Returns 0, or -1 in a forked child (*totals is then all zero).
int sim_counts(struct sim_totals* totals);

// Violations are calls that take memory away from work in flight: cuMemUnmap of a range that queued
// or running operations touch; cuMemFree, cuMemFreeHost and cuMemHostUnregister, which wait for all
// work of the device that was submitted before them, of a range that work submitted meanwhile
// touches. Illegal accesses are operations that reached memory that was not mapped or not
// accessible when they ran.
// Both are written into one list, the first 1000 as text. Copies entry `index` into buffer (cut to
// size, zero-terminated) and returns the length of the whole text, or -1 past the end.
int sim_violation(uint64_t index, char* buffer, size_t size);
// Empties the list, sets both counts to 0, and heals contexts that an illegal access has broken.
void sim_clear_violations(void);

// Memory of the device that "another process" holds, replacing what an earlier call said. More
// than what is free leaves 0 free. Returns 0, or -1 for an unknown device.
int sim_occupy(int device, uint64_t bytes);
// Pinned and registered host memory that can be had in sum (default: no limit); beyond it
// cuMemHostAlloc and cuMemHostRegister return CUDA_ERROR_OUT_OF_MEMORY.
void sim_host_limit(uint64_t bytes);

// Every copy, set, launch and host function waits this long before it starts (default 0).
void sim_stream_delay(uint64_t microseconds);
// Copies take at least size / rate (bytes per second; default 0: as fast as they go).
void sim_copy_rate(uint64_t bytes_per_second);
// While held (1), no stream starts another operation; 0 lets them go on. A call that waits for
// work waits as long.
void sim_hold_streams(int held);

// 1: every driver call from now on returns CUDA_ERROR_DEINITIALIZED, as at process exit after the
// driver's own teardown; 0: back to normal. State is kept.
void sim_deinitialize(int gone);

#ifdef __cplusplus
}
#endif

#endif  // MEMSAVER_SIM_SIM_H_
