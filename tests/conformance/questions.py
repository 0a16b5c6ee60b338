"""Asks a CUDA driver what its documentation leaves open. Prints `question: answer` lines.

    python questions.py                  the real driver, libcuda.so.1
    python questions.py sim              the simulated one
    python questions.py /path/to/lib.so  another

Never fails. What could break a context or the process is asked in a process of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from driver_api import (
    GLOBAL,
    KERNEL_IMAGE,
    LEGACY,
    MIB,
    READ,
    RELAXED,
    SUCCESS,
    Driver,
    HostFunction,
    in_child,
    in_thread,
    simulator_path,
)

PAGE = 2 * MIB
BUSY_SECONDS = 0.3


# Each makes what its call needs, yields the call, and clears up afterwards. The call may be made a
# second time when it was refused.


def created(drv, name, kind, release, *arguments):
    out = kind()

    def call():
        return getattr(drv, name)(ctypes.addressof(out), *arguments)

    yield call
    if out.value:
        release(out.value)


def free_small(drv):
    block = drv.get("cuMemAlloc", ctypes.c_uint64, 512)
    neighbour = drv.get("cuMemAlloc", ctypes.c_uint64, 512)  # so that the driver's slab stays
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
    ctypes.memset(pinned, 0, PAGE)  # pieces of no bytes
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


def name_of(drv, code):
    return f"{drv.text('cuGetErrorName', code) or '?'} ({code})"


def finish(call, steps, code):
    if code != SUCCESS:
        call()
    for _ in steps:
        pass


def make_busy(drv, stream, address):
    """A host function of BUSY_SECONDS without Python in it, and a set after it."""
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, HostFunction)
    drv.check("cuLaunchHostFunc", stream, sleep, c_void_p(int(BUSY_SECONDS * 1e6)))
    drv.check("cuMemsetD8Async", address, 1, PAGE, stream)


def does_it_wait(drv, make):
    address, handle = drv.mapped(PAGE)
    stream, steps = drv.stream(), make(drv)
    call = next(steps)
    make_busy(drv, stream, address)
    started = time.perf_counter()
    code = call()
    seconds = time.perf_counter() - started
    busy = drv.cuStreamQuery(stream) != SUCCESS
    drv.check("cuStreamSynchronize", stream)
    finish(call, steps, code)
    drv.check("cuStreamDestroy", stream)
    drv.discard(address, PAGE, handle)
    waited = "returns while the work runs" if busy else "WAITS"
    return f"{waited}, {seconds * 1e3:.2f} ms, {name_of(drv, code)}"


def does_destroying_the_busy_stream_wait(drv):
    address, handle = drv.mapped(PAGE)
    stream = drv.stream()
    make_busy(drv, stream, address)
    started = time.perf_counter()
    code = drv.cuStreamDestroy(stream)
    seconds = time.perf_counter() - started
    drv.check("cuCtxSynchronize")
    drv.discard(address, PAGE, handle)
    waited = "WAITS" if seconds > BUSY_SECONDS / 2 else "returns while the work runs"
    return f"{waited}, {seconds * 1e3:.2f} ms, {name_of(drv, code)}"


def does_it_break_a_capture(drv, make, thread_mode):
    address, handle = drv.mapped(PAGE)
    stream, steps = drv.stream(), make(drv)
    call = next(steps)
    drv.check("cuStreamBeginCapture", stream, GLOBAL)
    drv.check("cuMemsetD8Async", address, 1, PAGE, stream)
    previous = drv.thread_mode(thread_mode)
    code = call()
    drv.thread_mode(previous)
    graph = c_void_p()
    ended = drv.cuStreamEndCapture(stream, byref(graph))
    if graph:
        drv.cuGraphDestroy(graph)
    finish(call, steps, code)
    drv.check("cuStreamDestroy", stream)
    drv.discard(address, PAGE, handle)
    verdict = "capture valid" if ended == SUCCESS else f"capture BROKEN, {name_of(drv, ended)}"
    return f"{name_of(drv, code)}, {verdict}"


# Asked in a process of their own. Each runs from its source alone, with driver_api imported.


def reserve_aligned(drv):
    drv.start()
    answers = []
    for alignment in (64 << 30, 1 << 40):
        out = ctypes.c_uint64()
        code = drv.cuMemAddressReserve(byref(out), 2 << 20, alignment, 0, 0)
        aligned = "aligned" if out.value % alignment == 0 else "NOT aligned"
        answers.append(f"{alignment >> 30} GiB {code} {aligned}")
    return ", ".join(answers)


def reserve_a_page_of_the_host(drv):
    drv.start()
    out = ctypes.c_uint64()
    return drv.cuMemAddressReserve(byref(out), 4096, 0, 0, 0)


def map_twice(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(2 * page), drv.create(page)
    codes = [drv.cuMemMap(address + i * page, page, 0, handle, 0) for i in (0, 1)]
    return [*codes, drv.set_access(address, 2 * page)]


def map_part_of_a_handle(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(2 * page), drv.create(2 * page)
    return drv.cuMemMap(address, page, 0, handle, 0)


def map_without_reservation(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(page), drv.create(page)
    drv.check("cuMemAddressFree", address, page)
    return drv.cuMemMap(address, page, 0, handle, 0)


def map_across_two_reservations(drv):
    drv.start()
    page = 2 << 20
    first = drv.reserve(4 * page)
    drv.check("cuMemAddressFree", first, 4 * page)
    low, high = drv.reserve(2 * page, 0, first), drv.reserve(2 * page, 0, first + 2 * page)
    if (low, high) != (first, first + 2 * page):
        return "hints were not taken"
    handle = drv.create(2 * page)
    code = drv.cuMemMap(low + page, 2 * page, 0, handle, 0)
    one, other = drv.create(page), drv.create(page)
    if code == 0:
        drv.check("cuMemUnmap", low + page, 2 * page)
    drv.map(low + page, page, one, access=False)
    drv.map(high, page, other, access=False)
    access = drv.set_access(low + page, 2 * page)
    return {"map": code, "set access": access, "unmap": drv.cuMemUnmap(low + page, 2 * page)}


def unmap_half(drv):
    drv.start()
    page = 2 << 20
    address, _ = drv.mapped(2 * page)
    codes = [drv.cuMemUnmap(address, page), drv.cuMemUnmap(address + page, page)]
    out = ctypes.create_string_buffer(4)
    codes.append(drv.cuMemcpyDtoH(ctypes.addressof(out), address, 4))
    return [*codes, drv.cuMemUnmap(address, 2 * page)]


def unmap_over_a_hole(drv):
    drv.start()
    page = 2 << 20
    address = drv.reserve(3 * page)
    for i in (0, 2):
        drv.map(address + i * page, page, drv.create(page))
    code = drv.cuMemUnmap(address, 3 * page)
    return [code] + [drv.cuMemUnmap(address + i * page, page) for i in (0, 2)]


def left_after_unmapping_over_a_hole(drv):
    drv.start()
    page, out = 2 << 20, ctypes.c_uint64()
    address = drv.reserve(3 * page)
    for i in (0, 2):
        drv.map(address + i * page, page, drv.create(page))
    code = drv.cuMemUnmap(address, 3 * page)
    places = [address, address + 2 * page]
    found = [drv.cuMemRetainAllocationHandle(byref(out), place) for place in places]
    return {"unmap": code, "handle behind each": found}


def map_at_odd_places(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(4 * page), drv.create(2 * page)
    return {
        "4 KiB into a page": drv.cuMemMap(address + 4096, 2 * page, 0, handle, 0),
        "flags 1": drv.cuMemMap(address, 2 * page, 0, handle, 1),
        "more than the handle": drv.cuMemMap(address, 4 * page, 0, handle, 0),
        "0 bytes": drv.cuMemMap(address, 0, 0, handle, 0),
        "over the end": drv.cuMemMap(address + 3 * page, 2 * page, 0, handle, 0),
    }


def host_memory_of_no_size(drv):
    drv.start()
    out = c_void_p(1)
    code = drv.cuMemHostAlloc(byref(out), 0, 0)
    pointer = "untouched" if out.value == 1 else "null" if not out.value else "an address"
    return {"code": code, "pointer": pointer}


def small_block_on_a_full_device(drv):
    drv.start()
    page, handles = 2 << 20, []
    blocks = [drv.get("cuMemAlloc", ctypes.c_uint64, 512)]
    size = drv.free_bytes() // page * page
    while size >= page:
        out = ctypes.c_uint64()
        if drv.cuMemCreate(byref(out), size, byref(drv.properties()), 0) == 0:
            handles.append(out.value)
        else:
            size = size // 2 // page * page
    out = ctypes.c_uint64()
    return {"512 B": drv.cuMemAlloc(byref(out), 512), "free of it": drv.cuMemFree(blocks[0])}


def free_with_a_mapping(drv):
    drv.start()
    page = 2 << 20
    address, _ = drv.mapped(page)
    codes = [drv.cuMemAddressFree(address, page), drv.cuMemUnmap(address, page)]
    return [*codes, drv.cuMemAddressFree(address, page)]


def access_over_a_hole(drv):
    drv.start()
    page = 2 << 20
    address = drv.reserve(3 * page)
    for i in (0, 2):
        drv.map(address + i * page, page, drv.create(page), access=False)
    code = drv.set_access(address, 3 * page)
    return {"code": code, "rights": [drv.get_access(address + i * page) for i in (0, 2)]}


def access_of_half(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(2 * page), drv.create(2 * page)
    drv.map(address, 2 * page, handle, access=False)
    code = drv.set_access(address, page)
    return {"code": code, "rights": [drv.get_access(address + i * page) for i in (0, 1)]}


def access_read_only(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    return {"code": drv.set_access(address, 2 << 20, READ), "rights": drv.get_access(address)}


def access_none_again(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    return {"code": drv.set_access(address, 2 << 20, 0), "rights": drv.get_access(address)}


def access_of_unknown_device(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    return drv.set_access(address, 2 << 20, device=63)


def release_twice(drv):
    drv.start()
    handle = drv.create(2 << 20)
    return [drv.cuMemRelease(handle), drv.cuMemRelease(handle)]


def release_twice_while_mapped(drv):
    drv.start()
    address, handle = drv.mapped(2 << 20)
    codes = [drv.cuMemRelease(handle), drv.cuMemRelease(handle)]
    return [*codes, drv.cuMemUnmap(address, 2 << 20)]


def release_of_nonsense(drv):
    drv.start()
    return drv.cuMemRelease(0x12345678)


def free_of_null(drv):
    drv.start()
    return {"cuMemFree": drv.cuMemFree(0), "cuMemFreeHost": drv.cuMemFreeHost(0)}


def launch_on_unpinned_memory(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    kernel, stream = drv.kernel(drv.module()), drv.stream()
    memory = ctypes.create_string_buffer(8192)
    pieces = (ctypes.addressof(memory) + 15) // 16 * 16
    (ctypes.c_uint64 * 2).from_address(pieces)[:] = [address, 64]
    code = drv.launch(kernel, pieces, pieces + 4096, 1, stream)
    return {"launch": code, "synchronize": drv.cuStreamSynchronize(stream)}


def garbage_images(drv):
    drv.start()
    out, found = c_void_p(), {}
    for name, text in {"text": b"garbage", "nothing": b"", "a zeroed page": bytes(4096)}.items():
        image = ctypes.create_string_buffer(text, 4097)
        found[name] = drv.cuModuleLoadData(byref(out), ctypes.addressof(image))
    return found


def launch_in_other_geometries(drv):
    drv.start()
    kernel, stream, pinned = drv.kernel(drv.module()), drv.stream(), drv.pinned(8192)
    ctypes.memset(pinned, 0, 8192)
    values = [ctypes.c_uint64(pinned), ctypes.c_uint64(pinned + 4096), ctypes.c_uint32(1)]
    arguments = (c_void_p * 3)(*[ctypes.addressof(value) for value in values])
    found = {}
    for blocks, threads in ((0, 256), (1, 0), (1, 512), (1, 2048)):
        code = drv.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        found[f"{blocks} of {threads}"] = code
    return [found, drv.cuStreamSynchronize(stream)]


def set_reserved(drv):
    drv.start()
    address, other = drv.reserve(2 << 20), drv.mapped(2 << 20)[0]
    code = drv.cuMemsetD8(address, 1, 64)
    later = drv.cuCtxSynchronize()
    return {"at once": code, "later": later, "the next set": drv.cuMemsetD8(other, 1, 64)}


def set_without_access(drv):
    drv.start()
    address, other = drv.reserve(2 << 20), drv.mapped(2 << 20)[0]
    drv.map(address, 2 << 20, drv.create(2 << 20), access=False)
    code = drv.cuMemsetD8(address, 1, 64)
    later = drv.cuCtxSynchronize()
    return {"at once": code, "later": later, "the next set": drv.cuMemsetD8(other, 1, 64)}


def copy_without_access(drv):
    drv.start()
    address, other = drv.reserve(4 << 20), drv.mapped(2 << 20)[0]
    drv.map(address, 2 << 20, drv.create(2 << 20), access=False)
    buffer = ctypes.create_string_buffer(64)
    mapped = drv.cuMemcpyDtoH(ctypes.addressof(buffer), address, 64)
    reserved = drv.cuMemcpyDtoH(ctypes.addressof(buffer), address + (2 << 20), 64)
    later = drv.cuCtxSynchronize()
    after = drv.cuMemsetD8(other, 1, 64)
    return {"mapped": mapped, "reserved": reserved, "later": later, "the next set": after}


def unmap_under_queued_work(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.mapped(page)
    other, other_handle = drv.mapped(page)
    stream = drv.stream()
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, HostFunction)
    drv.check("cuLaunchHostFunc", stream, sleep, c_void_p(300000))
    submitted = drv.cuMemsetD8Async(address, 1, page, stream)
    unmapped = drv.cuMemUnmap(address, page)
    out = ctypes.c_size_t()
    return {
        "submit": submitted,
        "unmap": unmapped,
        "synchronize": drv.cuStreamSynchronize(stream),
        "then cuMemGetInfo": drv.cuMemGetInfo(byref(out), byref(out)),
        "cuMemCreate": drv.cuMemCreate(byref(out), page, byref(drv.properties()), 0),
        "cuMemUnmap": drv.cuMemUnmap(other, page),
        "cuMemRelease": drv.cuMemRelease(other_handle),
        "cuMemAddressFree": drv.cuMemAddressFree(other, page),
        "cuMemRelease of the unmapped": drv.cuMemRelease(handle),
    }


def without_current_context(drv):
    drv.check("cuInit", 0)
    page, out = 2 << 20, ctypes.c_uint64()

    def codes():
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        found = {"reserve": drv.cuMemAddressReserve(byref(address), page, 0, 0, 0)}
        properties = drv.properties(0)
        found["create"] = drv.cuMemCreate(byref(handle), page, byref(properties), 0)
        if handle.value and address.value:
            found["map"] = drv.cuMemMap(address.value, page, 0, handle.value, 0)
            found["access"] = drv.set_access(address.value, page)
            found["pointer"] = drv.cuPointerGetAttribute(byref(out), 2, address.value)
            found["unmap"] = drv.cuMemUnmap(address.value, page)
            found["release"] = drv.cuMemRelease(handle.value)
            found["free"] = drv.cuMemAddressFree(address.value, page)
        return found

    before = codes()
    drv.start()
    drv.cuCtxSetCurrent(None)
    return {"no context at all": before, "retained, none current": codes()}


def context_released_under_mappings(drv):
    drv.start()
    address, _handle = drv.mapped(2 << 20)
    drv.write(address, b"kept")
    drv.check("cuDevicePrimaryCtxRelease", 0)
    drv.start()
    buffer = ctypes.create_string_buffer(4)
    read = drv.cuMemcpyDtoH(ctypes.addressof(buffer), address, 4)
    kept = buffer.raw.decode(errors="replace")
    return {"read": read, "found": kept, "unmap": drv.cuMemUnmap(address, 2 << 20)}


def pointers_into_mapped_memory(drv):
    drv.start()
    page = 2 << 20
    address = drv.reserve(4 * page)
    for i in (0, 1):
        drv.map(address + i * page, page, drv.create(page))
    drv.map(address + 2 * page, page, drv.create(page), access=False)
    found = {}
    names = {"context": 1, "type": 2, "ordinal": 9, "range start": 11, "range size": 12}
    names["mapped"] = 13
    places = {"accessible": page + 64, "no access": 2 * page, "reserved": 3 * page}
    for place, offset in places.items():
        for name, attribute in names.items():
            out = ctypes.c_uint64()
            code = drv.cuPointerGetAttribute(byref(out), attribute, address + offset)
            value = out.value
            if code == 0 and name == "context":
                value = "null" if value == 0 else "primary" if value == drv.context.value else "?"
            if code == 0 and name == "range start":
                value = f"reservation +{value - address}"
            found[f"{place} {name}"] = value if code == 0 else f"code {code}"
    return found


def register_what_is_pinned(drv):
    drv.start()
    pinned = drv.pinned(2 << 20)
    codes = {"register pinned": drv.cuMemHostRegister(pinned, 4096, 0)}
    codes["unregister pinned"] = drv.cuMemHostUnregister(pinned)
    codes["free the middle of pinned"] = drv.cuMemFreeHost(pinned + 4096)
    return codes


def register_pages(drv):
    drv.start()
    import mmap

    memory = mmap.mmap(-1, 8 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    codes = {"unaligned": drv.cuMemHostRegister(address + 100, 1000, 0)}
    codes["same page, apart"] = drv.cuMemHostRegister(address + 2000, 1000, 0)
    codes["next page"] = drv.cuMemHostRegister(address + 4096, 4096, 0)
    codes["unregister by page"] = drv.cuMemHostUnregister(address)
    codes["unregister by its address"] = drv.cuMemHostUnregister(address + 100)
    codes["unregister the middle"] = drv.cuMemHostUnregister(address + 4096 + 64)
    codes["nothing there"] = drv.cuMemHostRegister(1 << 20, 4096, 0)
    return codes


def register_device_memory(drv):
    drv.start()
    address = drv.reserve(2 << 20)
    reserved = drv.cuMemHostRegister(address, 4096, 0)
    drv.map(address, 2 << 20, drv.create(2 << 20))
    return {"reserved": reserved, "mapped": drv.cuMemHostRegister(address, 4096, 0)}


def unmap_a_plain_block(drv):
    drv.start()
    block = drv.get("cuMemAlloc", ctypes.c_uint64, 2 << 20)
    out = ctypes.c_uint64()
    retained = drv.cuMemRetainAllocationHandle(byref(out), block)
    return {"unmap": drv.cuMemUnmap(block, 2 << 20), "retain handle": retained}


def after_invalidation(drv):
    drv.start()
    stream, out, graph = drv.stream(), c_void_p(), c_void_p()
    drv.check("cuStreamBeginCapture", stream, GLOBAL)
    codes = [drv.cuMemHostAlloc(byref(out), 4096, 0) for _ in range(2)]
    return [*codes, drv.cuStreamEndCapture(stream, byref(graph))]


def capture_of_a_blocking_stream(drv):
    drv.start()
    page = 2 << 20
    address, _ = drv.mapped(page)
    buffer = ctypes.create_string_buffer(64)

    def ask(call):
        stream, graph = drv.stream(0), c_void_p()
        drv.check("cuStreamBeginCapture", stream, RELAXED)
        code = call()
        return [code, drv.cuStreamEndCapture(stream, byref(graph))]

    status = c_int()
    return {
        "cuMemcpyDtoH": ask(lambda: drv.cuMemcpyDtoH(ctypes.addressof(buffer), address, 64)),
        "cuMemsetD8": ask(lambda: drv.cuMemsetD8(address, 1, 64)),
        "is legacy capturing": ask(lambda: drv.cuStreamIsCapturing(LEGACY, byref(status))),
        "synchronize legacy": ask(lambda: drv.cuStreamSynchronize(LEGACY)),
    }


def stream_destroyed_while_capturing(drv):
    drv.start()
    stream = drv.stream()
    drv.check("cuStreamBeginCapture", stream, GLOBAL)
    return [drv.cuStreamDestroy(stream), drv.cuCtxSynchronize()]


def driver_calls_in_a_host_function(drv):
    drv.start()
    address, _handle = drv.mapped(2 << 20)
    stream, found = drv.stream(), []

    def inside():
        drv.cuCtxSetCurrent(drv.context)
        out = ctypes.c_size_t()
        found.append(drv.cuMemGetInfo(byref(out), byref(out)))
        found.append(drv.cuMemUnmap(address, 2 << 20))

    drv.host_function(stream, inside)
    drv.check("cuStreamSynchronize", stream)
    return {"cuMemGetInfo": found[0], "cuMemUnmap": found[1]}


def unknown_handles(drv):
    drv.start()
    stream, event = drv.stream(), drv.event()
    drv.check("cuStreamDestroy", stream)
    drv.check("cuEventDestroy", event)
    return {"stream": drv.cuStreamQuery(stream), "event": drv.cuEventQuery(event)}


def handle_size_and_device(drv):
    drv.start()
    out = ctypes.c_uint64()
    no_device = drv.cuMemCreate(byref(out), 2 << 20, byref(drv.properties(63)), 0)
    return {
        "0 bytes": drv.try_create(0),
        "2 MiB + 4 KiB": drv.try_create((2 << 20) + 4096),
        "unknown device": no_device,
        "1 PiB": drv.try_create(1 << 50),
    }


def many_small_blocks(drv):
    drv.start()
    before = drv.free_bytes()
    blocks = [drv.get("cuMemAlloc", ctypes.c_uint64, 512) for _ in range(100)]
    taken = before - drv.free_bytes()
    for block in blocks:
        drv.check("cuMemFree", block)
    return {"taken by 100 of 512 B": taken, "kept after": before - drv.free_bytes()}


ALONE = {
    "reservation aligned to": reserve_aligned,
    "reservation of 4 KiB": reserve_a_page_of_the_host,
    "one handle mapped at two addresses, access to both": map_twice,
    "map a part of a handle": map_part_of_a_handle,
    "map where nothing is reserved": map_without_reservation,
    "across two neighbouring reservations": map_across_two_reservations,
    "unmap first half, second half; read; unmap whole": unmap_half,
    "unmap over a hole; then the parts": unmap_over_a_hole,
    "what is left after unmapping over a hole": left_after_unmapping_over_a_hole,
    "map at odd places": map_at_odd_places,
    "free a reservation with a mapping; unmap; free": free_with_a_mapping,
    "access over a hole": access_over_a_hole,
    "access to half of a mapping": access_of_half,
    "access read-only": access_read_only,
    "access taken away": access_none_again,
    "access for an unknown device": access_of_unknown_device,
    "release twice": release_twice,
    "release twice while mapped; unmap": release_twice_while_mapped,
    "release of a number that is no handle": release_of_nonsense,
    "free of null": free_of_null,
    "launch on host memory that is not pinned": launch_on_unpinned_memory,
    "launch in other geometries": launch_in_other_geometries,
    "images of garbage": garbage_images,
    "set memory that is reserved only": set_reserved,
    "set mapped memory without access": set_without_access,
    "copy mapped memory without access": copy_without_access,
    "unmap under a queued set": unmap_under_queued_work,
    "mapping calls without a context": without_current_context,
    "primary context released under a mapping": context_released_under_mappings,
    "pointer attributes": pointers_into_mapped_memory,
    "register pinned memory": register_what_is_pinned,
    "register pages": register_pages,
    "register device memory": register_device_memory,
    "plain block": unmap_a_plain_block,
    "two forbidden calls in a capture; end": after_invalidation,
    "capture of a blocking stream: code, end": capture_of_a_blocking_stream,
    "destroy a capturing stream; wait for the context": stream_destroyed_while_capturing,
    "driver calls in a host function": driver_calls_in_a_host_function,
    "destroyed handles": unknown_handles,
    "cuMemCreate of": handle_size_and_device,
    "host memory of no size": host_memory_of_no_size,
    "small cuMemAlloc blocks": many_small_blocks,
    "small block on a full device": small_block_on_a_full_device,
}
THE_GPU_TO_THEMSELVES = {"small cuMemAlloc blocks", "small block on a full device"}


def answer(question, ask):
    try:
        text = ask()
    except BaseException as error:  # an answer too
        text = f"could not be asked: {type(error).__name__} {error}"
    print(f"{question}: {text}", flush=True)


def ask_here(drv):
    for name, make in CALLS.items():
        if make in NEEDS and not drv.has(NEEDS[make]):
            print(f"does {name} wait: the driver does not have it")
            continue
        answer(
            f"does {name} wait for a non-blocking stream",
            lambda make=make: in_thread(drv, lambda: does_it_wait(drv, make), timeout=10),
        )
    answer(
        "does cuStreamDestroy wait for the stream's own work",
        lambda: does_destroying_the_busy_stream_wait(drv),
    )
    for mode, mode_name in ((RELAXED, "relaxed"), (GLOBAL, "default")):
        for name, make in CALLS.items():
            if make not in NEEDS or drv.has(NEEDS[make]):
                answer(
                    f"{name} under a global capture, {mode_name} thread",
                    lambda make=make, mode=mode: does_it_break_a_capture(drv, make, mode),
                )


def main() -> None:
    named = sys.argv[1] if len(sys.argv) > 1 else "libcuda.so.1"
    path = simulator_path() if named == "sim" else named
    if path is None:
        print("driver: libmemsaver_sim.so is not built")
        return
    try:
        drv = Driver(path).start()
    except Exception as error:
        print(f"driver: {path} cannot be used: {error}")
        return
    print(f"driver: {path}, version {drv.get('cuDriverGetVersion', c_int)}")
    ask_here(drv)
    with ThreadPoolExecutor(4) as pool:  # most of the time is a process finding its GPU
        found = {
            name: pool.submit(in_child, path, ask, 12)
            for name, ask in ALONE.items()
            if name not in THE_GPU_TO_THEMSELVES
        }
        for name, future in found.items():
            answer(name, future.result)
    for name in sorted(THE_GPU_TO_THEMSELVES):
        answer(name, lambda name=name: in_child(path, ALONE[name], 12))


if __name__ == "__main__":
    main()
