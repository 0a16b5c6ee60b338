// abi: memsaver.h's functions, except those for transitions. Only converts C types to core types
// and exceptions to status codes.
#include <cstdlib>

#include "core/abi/marshal.h"
#include "core/backup/fingerprint.h"
#include "core/driver/driver.h"
#include "core/memory/allocation.h"
#include "core/memory/backups.h"
#include "core/memory/importer.h"
#include "core/memory/region.h"
#include "core/memory/reservation.h"
#include "core/observe/stats_server.h"
#include "core/platform/lifecycle.h"
#include "core/platform/log.h"
#include "core/platform/options.h"
#include "memsaver.h"

namespace {

using namespace memsaver;

Device& device_of(int ordinal) { return Device::get(ordinal < 0 ? Device::current() : ordinal); }

}  // namespace

extern "C" {

const char* ms_version(void) { return MEMSAVER_VERSION; }

ms_status ms_driver_info(int* version, const char** library, int* simulated, ms_error* error) {
  return guarded(error, [&] {
    const DriverTable& table = driver();
    if (version) *version = table.version;
    if (library) *library = table.opened.c_str();
    if (simulated) *simulated = table.simulated ? 1 : 0;
  });
}

ms_status ms_device_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes,
                           ms_error* error) {
  return in_own_process(error, [&] {
    const Device::Memory memory = device_of(device).memory();
    if (free_bytes) *free_bytes = memory.free_bytes;
    if (total_bytes) *total_bytes = memory.total_bytes;
  });
}

ms_status ms_device_bus_id(int device, char* text, size_t capacity, ms_error* error) {
  return in_own_process(error, [&] {
    if (!text || capacity == 0) {
      throw Error(Status::kInvalidArgument, "the buffer for the result is null or empty");
    }
    copy_text(text, capacity, device_of(device).bus_id());
  });
}

ms_status ms_device_count(int* count, ms_error* error) {
  return in_own_process(error, [&] {
    require_place(count);
    *count = Device::count();
  });
}

ms_status ms_configure(const char* name, const char* value, ms_error* error) {
  return guarded(error,
                 [&] { set_option(text_of(name, "the option"), text_of(value, "the value")); });
}

ms_status ms_check_option(const char* name, const char* value, ms_error* error) {
  return guarded(error,
                 [&] { check_option(text_of(name, "the option"), text_of(value, "the value")); });
}

ms_status ms_option(const char* name, char* value, size_t capacity, ms_error* error) {
  return guarded(error, [&] {
    if (!value || capacity == 0)
      throw Error(Status::kInvalidArgument, "the buffer for the value is null or empty");
    copy_text(value, capacity, option_text(text_of(name, "the option")));
  });
}

int ms_next_warning(char* text, size_t capacity) {
  int found = 0;
  guarded(nullptr, [&] {
    std::string warning;
    if (!text || capacity == 0 || forked() || !next_warning(&warning)) return;
    copy_text(text, capacity, warning);
    found = 1;
  });
  return found;
}

void ms_warn(const char* text) {
  if (forked() || !text) return;
  warn_of([&] { return std::string(text); });
}

void ms_list_free(void* list) { std::free(list); }

ms_status ms_region_enter(const char* tag, int backup, ms_error* error) {
  return in_own_process(error, [&] {
    enter_region(text_of(tag, "the tag"), policy_of(backup));
    stats_server::start();
  });
}

ms_status ms_region_exit(ms_error* error) {
  return guarded(error, [&] {
    if (!forked()) exit_region();  // a child may leave a region that its parent entered
  });
}

ms_status ms_disable_enter(ms_error* error) {
  return in_own_process(error, [&] { enter_disabled(); });
}

ms_status ms_region_limit(uint64_t devices, ms_error* error) {
  return guarded(error, [&] { limit_region(devices); });
}

const char* ms_region_tag(void) {
  const Tag* const tag = forked() ? nullptr : current_tag();
  return tag ? tag->name.c_str() : nullptr;
}

size_t ms_region_depth(void) { return region_depth(); }

ms_status ms_stream_bind(void* stream, const char* tag, int backup, ms_error* error) {
  return in_own_process(error, [&] {
    bind_stream(stream, text_of(tag, "the tag"), policy_of(backup));
    stats_server::start();
  });
}

ms_status ms_stream_unbind(void* stream, ms_error* error) {
  return in_own_process(error, [&] { unbind_stream(stream); });
}

ms_status ms_malloc(uint64_t bytes, int device, void** pointer, ms_error* error) {
  return guarded(error, [&] {
    require_place(pointer);
    *pointer = nullptr;
    require_not_forked();
    Tag* const tag = current_tag();
    if (!tag) throw Error(Status::kInvalidState, "the calling thread is in no region");
    if (bytes == 0) return;
    Device& on = device_of(device);
    if (!region_covers(on.ordinal())) {
      throw Error(Status::kInvalidState,
                  "the thread's region is not for device " + std::to_string(on.ordinal()));
    }
    *pointer = reinterpret_cast<void*>(allocate(*tag, on, bytes));
    on.adopt_thread();
    stats_server::start();  // the process's own tag has no region
  });
}

ms_status ms_malloc_any(uint64_t bytes, int device, void* stream, void** pointer, ms_error* error) {
  return guarded(error, [&] {
    require_place(pointer);
    *pointer = nullptr;
    require_not_forked();
    if (bytes == 0) return;
    Tag* const tag = current_tag(stream);
    Device& on = device_of(device);
    if (tag && region_covers(on.ordinal())) {
      *pointer = reinterpret_cast<void*>(allocate(*tag, on, bytes));
      stats_server::start();
      return;
    }
    DeviceScope scope(on);
    CUdeviceptr plain = 0;
    CU_CHECK(cuMemAlloc, &plain, bytes);
    *pointer = reinterpret_cast<void*>(plain);
  });
}

ms_status ms_free(void* pointer, ms_error* error) {
  return guarded(error, [&] {
    if (!pointer || forked()) return;  // a child shares the addresses, not the memory
    deallocate(reinterpret_cast<uint64_t>(pointer));
  });
}

ms_status ms_free_any(void* pointer, int device, ms_error* error) {
  if (!pointer || forked()) return MS_OK;
  if (ms_owns(pointer)) return ms_free(pointer, error);
  return guarded(error, [&] {
    DeviceScope scope(device_of(device));
    CU_CHECK(cuMemFree, reinterpret_cast<CUdeviceptr>(pointer));
  });
}

int ms_owns(const void* pointer) {
  return Registry::owner(reinterpret_cast<uint64_t>(pointer)) != nullptr;
}

int ms_wants(void) { return current_tag() != nullptr && !forked(); }

uint64_t ms_changes(void) { return Registry::instance().changes.load(); }

ms_status ms_refresh_peers(ms_error* error) {
  return in_own_process(error, [&] { share_with_active_devices(); });
}

ms_status ms_tag_state(const char* tag, int* state, ms_error* error) {
  return on_tag(tag, error, [&](Tag& found) {
    require_place(state);
    *state = static_cast<int>(found.state);
  });
}

ms_status ms_tag_pausable(const char* tag, int* pausable, ms_error* error) {
  return on_tag(tag, error, [&](Tag& found) {
    require_place(pausable);
    *pausable = found.state == State::kMapped && found.open_regions == 0 &&
                !would_wait({&found}, Need::kTransition) && !is_imported({&found});
  });
}

ms_status ms_tag_backup(const char* tag, int* backup, ms_error* error) {
  return on_tag(tag, error, [&](Tag& found) {
    require_place(backup);
    *backup = static_cast<int>(found.policy);
  });
}

ms_status ms_backup_view(uint64_t address, uint64_t bytes, int writable, void** host,
                         ms_error* error) {
  return in_own_process(error, [&] {
    require_place(host);
    *host = view_backup({address, bytes}, writable != 0);
  });
}

ms_status ms_retained_view(uint64_t address, uint64_t bytes, int writable, void** host,
                           ms_error* error) {
  return in_own_process(error, [&] {
    require_place(host);
    *host = view_retained({address, bytes}, writable != 0);
  });
}

ms_status ms_trim(uint64_t* released_bytes, ms_error* error) {
  return on_tags(error, [&] {
    const uint64_t released = Fingerprinter::trim() + trim_backups({});
    if (released_bytes) *released_bytes = released;
  });
}

ms_status ms_trim_tags(const char* const* tags, size_t tag_count, uint64_t* released_bytes,
                       ms_error* error) {
  return on_tags(error, [&] {
    const uint64_t released = trim_backups(names_of(tags, tag_count));
    if (released_bytes) *released_bytes = released;
  });
}

}  // extern "C"
