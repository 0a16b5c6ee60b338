// The functions of sim.h.
#include <cstring>
#include <string>
#include <vector>

#include "host_faults.h"
#include "sim.h"
#include "state.h"
#include "transfer.h"

using namespace memsaver::sim;

namespace {

int copy_text(const std::string& text, char* buffer, size_t size) {
  if (buffer != nullptr && size > 0) {
    const size_t length = text.copy(buffer, size - 1);
    buffer[length] = '\0';
  }
  return static_cast<int>(text.size());
}

bool reach(const Range& range, bool write, std::vector<Span>* spans) {
  if (in_forked_child()) return false;
  Lock lock(state().mutex);
  return resolve(range, kAnyDevice, write, spans);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int sim_settings_problem(char* buffer, size_t size) {
  if (in_forked_child()) return 0;
  Lock lock(state().mutex);
  return copy_text(state().settings_problem, buffer, size);
}

int64_t sim_begin_fault(const char* call, uint64_t nth, int code, uint64_t times) {
  if (in_forked_child() || call == nullptr) return -1;
  Lock lock(state().mutex);
  return state().faults.add({call, nth, code, times});
}

void sim_end_fault(int64_t number) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().faults.remove(number);
}

int sim_fail(const char* call, uint64_t nth, int code, uint64_t times) {
  return sim_begin_fault(call, nth, code, times) < 0 ? -1 : 0;
}

void sim_clear_faults(void) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().faults.clear();
}

uint64_t sim_calls(const char* call) {
  if (in_forked_child() || call == nullptr) return 0;
  Lock lock(state().mutex);
  return state().faults.calls(call);
}

int sim_counts(struct sim_totals* totals) {
  if (totals == nullptr) return -1;
  std::memset(totals, 0, sizeof *totals);
  if (in_forked_child()) return -1;
  State& shared = state();
  Lock lock(shared.mutex);
  totals->handles = shared.handles.size();
  totals->mappings = shared.space.mapping_count();
  totals->reservations = shared.space.reservation_count();
  totals->reserved_bytes = shared.space.reserved_bytes();
  totals->allocations = shared.space.block_count();
  totals->pinned_bytes = shared.host.pinned_bytes();
  totals->registered_bytes = shared.host.registered_bytes();
  totals->streams = shared.streams.created();
  totals->events = shared.events.size();
  totals->graphs = shared.graphs.size() + shared.executables.size();
  totals->modules = shared.modules.size();
  totals->captures = shared.captures.active();
  totals->queued_operations = shared.streams.queued_operations();
  totals->violations = shared.diagnostics.violations();
  totals->illegal_accesses = shared.diagnostics.illegal_accesses();
  totals->devices = shared.devices.size();
  for (size_t i = 0; i < shared.devices.size(); ++i) {
    totals->physical_bytes[i] = shared.devices[i]->memory.used_bytes();
    totals->retained_contexts += shared.devices[i]->context.retained;
  }
  return 0;
}

int sim_violation(uint64_t index, char* buffer, size_t size) {
  if (in_forked_child()) return -1;
  Lock lock(state().mutex);
  const std::vector<std::string>& entries = state().diagnostics.entries();
  if (index >= entries.size()) return -1;
  return copy_text(entries[index], buffer, size);
}

void sim_clear_violations(void) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().diagnostics.clear();
  for (const auto& device : state().devices) device->context.broken = CUDA_SUCCESS;
}

int sim_occupy(int device, uint64_t bytes) {
  if (in_forked_child()) return -1;
  Lock lock(state().mutex);
  Device* found = state().device(device);
  if (found == nullptr) return -1;
  found->memory.occupy(bytes);
  return 0;
}

int sim_granularity(uint64_t bytes) {
  if (in_forked_child()) return -1;
  Lock lock(state().mutex);
  return !state().initialized && set_granularity(bytes) ? 0 : -1;
}

void sim_peer_access(int possible) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().peer_access = possible != 0;
}

void sim_host_limit(uint64_t bytes) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().host.set_limit(bytes);
}

int sim_read(uint64_t address, void* buffer, uint64_t size) {
  std::vector<Span> spans;
  return reach({address, size}, false, &spans) && fetch(spans, buffer) ? 0 : -1;
}

int sim_write(uint64_t address, const void* buffer, uint64_t size) {
  std::vector<Span> spans;
  return reach({address, size}, true, &spans) && store(buffer, spans) ? 0 : -1;
}

void sim_stream_delay(uint64_t microseconds) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().streams.set_delay(microseconds);
}

void sim_copy_rate(uint64_t bytes_per_second) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().streams.set_copy_rate(bytes_per_second);
}

void sim_hold_streams(int held) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().streams.hold(held != 0);
}

void sim_hold_memory(uint64_t address, uint64_t bytes) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().streams.hold_memory({address, bytes});
}

void sim_deinitialize(int gone) {
  if (in_forked_child()) return;
  Lock lock(state().mutex);
  state().deinitialized = gone != 0;
}

void sim_explain_host_faults(sim_paused_tag paused_tag) {
  if (!in_forked_child() && paused_tag != nullptr) explain_host_faults(paused_tag);
}

}  // extern "C"
#pragma GCC visibility pop
