"""Individual driver calls, each with its own setup and cleanup.

Each function is a generator that sets up a call, yields the call, and cleans up afterwards. A call
can be repeated after it has failed.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import byref, c_void_p

from driver_api import KERNEL_IMAGE
from driver_values import LEGACY, MIB, PAGE, SUCCESS


def created(drv, name, kind, release, *arguments):
    out = kind()

    def call():
        return getattr(drv, name)(ctypes.addressof(out), *arguments)

    yield call
    if out.value:
        release(out.value)


def free_small(drv):
    block = drv.get("cuMemAlloc", ctypes.c_uint64, 512)
    neighbour = drv.get("cuMemAlloc", ctypes.c_uint64, 512)  # keeps the driver's slab allocated
    yield lambda: drv.cuMemFree(block)
    drv.cuMemFree(neighbour)


def free_large(drv):
    block = drv.get("cuMemAlloc", ctypes.c_uint64, 4 * MIB)
    yield lambda: drv.cuMemFree(block)


def free_host(drv):
    pinned = drv.pinned(PAGE)
    yield lambda: drv.cuMemFreeHost(pinned)


def host_register(drv):
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    yield lambda: drv.cuMemHostRegister(address, PAGE, 0)
    drv.cuMemHostUnregister(address)


def host_unregister(drv):
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    drv.check("cuMemHostRegister", address, PAGE, 0)
    yield lambda: drv.cuMemHostUnregister(address)


def release(drv):
    handle = drv.create(PAGE)
    yield lambda: drv.cuMemRelease(handle)


def unmap(drv):
    address, handle = drv.mapped(PAGE)
    yield lambda: drv.cuMemUnmap(address, PAGE)
    drv.cuMemRelease(handle)
    drv.cuMemAddressFree(address, PAGE)


def unmap_the_last_of_released(drv):
    address, handle = drv.mapped(PAGE)
    drv.check("cuMemRelease", handle)
    yield lambda: drv.cuMemUnmap(address, PAGE)
    drv.cuMemAddressFree(address, PAGE)


def set_access(drv):
    address, handle = drv.reserve(PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle, access=False)
    yield lambda: drv.set_access(address, PAGE)
    drv.discard(address, PAGE, handle)


def address_free(drv):
    address = drv.reserve(PAGE)
    yield lambda: drv.cuMemAddressFree(address, PAGE)


def stream_destroy_idle(drv):
    stream = drv.stream()
    yield lambda: drv.cuStreamDestroy(stream)


def event_destroy(drv):
    event = drv.event()
    yield lambda: drv.cuEventDestroy(event)


def event_query(drv):
    event, stream = drv.event(), drv.stream()
    drv.check("cuEventRecord", event, stream)
    drv.check("cuStreamSynchronize", stream)
    yield lambda: drv.cuEventQuery(event)
    drv.cuEventDestroy(event)
    drv.cuStreamDestroy(stream)


def context_record_event(drv):
    event = drv.event()
    yield lambda: drv.cuCtxRecordEvent(drv.context, event)
    drv.cuEventDestroy(event)


def pool_trim(drv):
    pool = drv.get("cuDeviceGetDefaultMemPool", c_void_p, drv.device)
    yield lambda: drv.cuMemPoolTrimTo(pool, 0)


def copy_to_pageable(drv):
    address, handle = drv.mapped(PAGE)
    stream, buffer = drv.stream(), ctypes.create_string_buffer(PAGE)
    yield lambda: drv.cuMemcpyDtoHAsync(ctypes.addressof(buffer), address, PAGE, stream)
    drv.check("cuStreamSynchronize", stream)
    drv.cuStreamDestroy(stream)
    drv.discard(address, PAGE, handle)


def copy_synchronously(drv):
    address, handle = drv.mapped(PAGE)
    buffer = ctypes.create_string_buffer(PAGE)
    yield lambda: drv.cuMemcpyDtoH(ctypes.addressof(buffer), address, PAGE)
    drv.discard(address, PAGE, handle)


def set_synchronously(drv):
    address, handle = drv.mapped(PAGE)
    yield lambda: drv.cuMemsetD8(address, 1, PAGE)
    drv.check("cuStreamSynchronize", LEGACY)
    drv.discard(address, PAGE, handle)


def synchronize_legacy(drv):
    yield lambda: drv.cuStreamSynchronize(LEGACY)


def memory_info(drv):
    out = ctypes.c_size_t()
    yield lambda: drv.cuMemGetInfo(byref(out), byref(out))


def create(drv):
    return created(
        drv, "cuMemCreate", ctypes.c_uint64, drv.cuMemRelease, PAGE, byref(drv.properties()), 0
    )


def alloc_small(drv):
    return created(drv, "cuMemAlloc", ctypes.c_uint64, drv.cuMemFree, 512)


def alloc_large(drv):
    return created(drv, "cuMemAlloc", ctypes.c_uint64, drv.cuMemFree, 4 * MIB)


def host_alloc(drv):
    return created(drv, "cuMemHostAlloc", c_void_p, drv.cuMemFreeHost, PAGE, 0)


def module_load(drv):
    image = ctypes.create_string_buffer(KERNEL_IMAGE.read_bytes())
    return created(drv, "cuModuleLoadData", c_void_p, drv.cuModuleUnload, ctypes.addressof(image))


def function_get(drv):
    module, out = drv.module(), c_void_p()
    yield lambda: drv.cuModuleGetFunction(byref(out), module, b"ms_fingerprint")
    drv.cuModuleUnload(module)


def module_unload(drv):
    module = drv.module()
    drv.kernel(module)
    yield lambda: drv.cuModuleUnload(module)


def kernel_launch(drv):
    module, pinned, stream = drv.module(), drv.pinned(PAGE), drv.stream()
    kernel = drv.kernel(module)
    ctypes.memset(pinned, 0, PAGE)  # pieces with 0 bytes
    yield lambda: drv.launch(kernel, pinned, pinned + 4096, 4, stream)
    drv.check("cuStreamSynchronize", stream)
    drv.cuStreamDestroy(stream)
    drv.cuModuleUnload(module)
    drv.cuMemFreeHost(pinned)


def host_device_pointer(drv):
    pinned, out = drv.pinned(PAGE), ctypes.c_uint64()
    yield lambda: drv.cuMemHostGetDevicePointer(byref(out), pinned, 0)
    drv.cuMemFreeHost(pinned)


def stream_create(drv):
    return created(drv, "cuStreamCreate", c_void_p, drv.cuStreamDestroy, 1)


CALLS = {
    "cuMemFree of 512 B": free_small,
    "cuMemFree of 4 MiB": free_large,
    "cuMemFreeHost": free_host,
    "cuMemHostRegister": host_register,
    "cuMemHostUnregister": host_unregister,
    "cuMemRelease": release,
    "cuMemUnmap": unmap,
    "cuMemUnmap of the last mapping of released memory": unmap_the_last_of_released,
    "cuMemSetAccess": set_access,
    "cuMemAddressFree": address_free,
    "cuStreamDestroy of an idle stream": stream_destroy_idle,
    "cuStreamCreate": stream_create,
    "cuEventDestroy": event_destroy,
    "cuEventQuery": event_query,
    "cuCtxRecordEvent": context_record_event,
    "cuMemPoolTrimTo of the default pool": pool_trim,
    "cuMemCreate": create,
    "cuMemAlloc of 512 B": alloc_small,
    "cuMemAlloc of 4 MiB": alloc_large,
    "cuMemHostAlloc": host_alloc,
    "cuMemGetInfo": memory_info,
    "cuModuleLoadData": module_load,
    "cuModuleGetFunction": function_get,
    "cuModuleUnload": module_unload,
    "cuLaunchKernel on an idle stream": kernel_launch,
    "cuMemHostGetDevicePointer": host_device_pointer,
    "cuMemcpyDtoH": copy_synchronously,
    "cuMemcpyDtoHAsync to pageable memory on an idle stream": copy_to_pageable,
    "cuMemsetD8": set_synchronously,
    "cuStreamSynchronize of the legacy stream": synchronize_legacy,
}
NEEDS = {context_record_event: "cuCtxRecordEvent", pool_trim: "cuMemPoolTrimTo"}


def finish(call, steps, code):
    if code != SUCCESS:
        call()
    for _ in steps:
        pass
