"""What memsaver relies on in a CUDA driver, asserted of the simulated one and of the real one."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from driver_api import (
    ALREADY_REGISTERED,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GIB,
    GLOBAL,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_PTX,
    INVALID_VALUE,
    LEGACY,
    MIB,
    NON_BLOCKING,
    NOT_FOUND,
    NOT_INITIALIZED,
    NOT_PERMITTED,
    NOT_READY,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PER_THREAD,
    READ,
    READ_WRITE,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    TIB,
    WRONG_THREAD,
    Driver,
    DriverError,
    in_child,
    in_thread,
    real_driver_works,
    simulator_path,
)
from fingerprint_reference import digest
from questions import ALONE, CALLS, NEEDS, finish, many_small_blocks

PAGE = 2 * MIB
SIMULATOR = simulator_path()
_drivers: dict[str, Driver] = {}


def library_path(which: str) -> str:
    if which == "real":
        if not real_driver_works():
            pytest.skip("libcuda.so.1 finds no GPU")
        return "libcuda.so.1"
    if SIMULATOR is None:
        pytest.skip("libmemsaver_sim.so is not built")
    return SIMULATOR


def open_driver(which: str) -> Driver:
    if which not in _drivers:
        drv = Driver(library_path(which)).start()
        # The first use of a kind of object costs device memory that stays: not a leak.
        stream, event = drv.stream(), drv.event()
        drv.host_function(stream, lambda: None)
        block = drv.get("cuMemAlloc", ctypes.c_uint64, 512)
        drv.check("cuMemsetD8Async", block, 0, 512, stream)
        drv.check("cuStreamSynchronize", stream)
        drv.read(block, 512)
        drv.check("cuMemFree", block)
        drv.check("cuMemFreeHost", drv.pinned(4096))
        drv.check("cuEventDestroy", event)
        drv.check("cuStreamDestroy", stream)
        _drivers[which] = drv
    return _drivers[which]


def check_nothing_left(drv: Driver, free_before: int, totals_before: dict | None) -> None:
    if drv.simulated:
        deadline = time.monotonic() + 5  # a destroyed stream's last operation
        while drv.totals()["queued_operations"] and time.monotonic() < deadline:
            time.sleep(0.005)
        assert drv.totals() == totals_before
        assert drv.free_bytes() == free_before
    else:
        assert drv.free_bytes() >= free_before - 64 * MIB


@pytest.fixture(scope="module", autouse=True)
def release_contexts():
    yield
    for driver in _drivers.values():
        driver.check("cuCtxSetCurrent", None)
        driver.check("cuDevicePrimaryCtxRelease", driver.device)
    _drivers.clear()


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.gpu)])
def drv(request):
    driver = open_driver(request.param)
    driver.check("cuCtxSetCurrent", driver.context)
    totals = driver.totals() if driver.simulated else None
    free = driver.free_bytes()
    yield driver
    driver.check("cuCtxSetCurrent", driver.context)
    check_nothing_left(driver, free, totals)


@pytest.fixture
def sim():
    driver = open_driver("sim")
    driver.check("cuCtxSetCurrent", driver.context)
    totals, free = driver.totals(), driver.free_bytes()
    yield driver
    driver.opened.sim_clear_faults()
    driver.opened.sim_hold_streams(0)
    driver.opened.sim_clear_violations()
    check_nothing_left(driver, free, totals)


@pytest.fixture
def mapped(drv):
    """A mapped page: (address, handle)."""
    address, handle = drv.mapped(PAGE)
    yield address, handle
    drv.discard(address, PAGE, handle)


@pytest.fixture
def streams(drv):
    """A function that creates streams; they are destroyed at the end."""
    made = []

    def make(flags=NON_BLOCKING):
        made.append(drv.stream(flags))
        return made[-1]

    yield make
    for stream in made:
        drv.check("cuStreamDestroy", stream)


# Errors, initialisation, contexts


def test_error_names(drv):
    names = {
        0: "CUDA_SUCCESS",
        1: "CUDA_ERROR_INVALID_VALUE",
        2: "CUDA_ERROR_OUT_OF_MEMORY",
        3: "CUDA_ERROR_NOT_INITIALIZED",
        4: "CUDA_ERROR_DEINITIALIZED",
        201: "CUDA_ERROR_INVALID_CONTEXT",
        700: "CUDA_ERROR_ILLEGAL_ADDRESS",
        712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    }
    for code, name in names.items():
        assert drv.text("cuGetErrorName", code) == name
        assert drv.text("cuGetErrorString", code)
    assert drv.text("cuGetErrorString", 2) == "out of memory"


def test_unknown_error_has_no_name(drv):
    name = ctypes.c_void_p(1)
    assert drv.cuGetErrorName(123456, byref(name)) == INVALID_VALUE
    assert name.value is None


def test_before_initialisation(drv):
    def calls(drv):
        out = ctypes.create_string_buffer(64)
        return [
            drv.cuDeviceGetCount(out),
            drv.cuMemGetInfo(out, out),
            drv.cuMemAddressReserve(out, 2 << 20, 0, 0, 0),
            drv.cuMemCreate(out, 2 << 20, byref(drv.properties(0)), 0),
            drv.cuStreamCreate(out, 0),
            drv.cuMemAlloc(out, 512),
        ]

    assert in_child(drv.path, calls) == [NOT_INITIALIZED] * 6


def test_forked_child_is_refused_and_neither_hangs_nor_dies(drv):
    def forks(drv):
        drv.start()
        address, _ = drv.mapped(2 << 20)
        stream = drv.stream()
        drv.host_function(stream, lambda: time.sleep(0.2))
        drv.check("cuMemsetD8Async", address, 1, 2 << 20, stream)
        child = os.fork()
        if child == 0:
            out = ctypes.create_string_buffer(64)
            codes = {drv.cuInit(0), drv.cuMemGetInfo(out, out), drv.cuDeviceGetCount(out)}
            os._exit(0 if codes == {3} else 1)
        drv.check("cuStreamSynchronize", stream)
        return [os.waitpid(child, 0)[1], drv.read(address, 4).hex()]

    assert in_child(drv.path, forks) == [0, "01010101"]


def test_calls_that_need_a_context(drv):
    def codes():
        drv.cuCtxSetCurrent(None)
        out = ctypes.create_string_buffer(64)
        return {
            "cuMemGetInfo": drv.cuMemGetInfo(out, out),
            "cuMemAlloc": drv.cuMemAlloc(out, 512),
            "cuMemHostAlloc": drv.cuMemHostAlloc(out, 4096, 0),
            "cuStreamCreate": drv.cuStreamCreate(out, 0),
            "cuEventCreate": drv.cuEventCreate(out, 0),
            "cuCtxSynchronize": drv.cuCtxSynchronize(),
            "cuCtxGetDevice": drv.cuCtxGetDevice(out),
            "cuCtxPopCurrent": drv.cuCtxPopCurrent(out),
        }

    found = in_thread(drv, codes, with_context=False)
    assert found == dict.fromkeys(found, INVALID_CONTEXT)


def test_context_stack(drv):
    def body():
        assert drv.get("cuCtxGetCurrent", c_void_p) is None
        drv.check("cuCtxPushCurrent", drv.context)
        assert drv.get("cuCtxGetCurrent", c_void_p) == drv.context.value
        assert drv.get("cuCtxGetDevice", c_int) == drv.device
        assert drv.get("cuCtxPopCurrent", c_void_p) == drv.context.value
        assert drv.get("cuCtxGetCurrent", c_void_p) is None

    in_thread(drv, body, with_context=False)


def test_primary_context_is_counted(drv):
    assert drv.get("cuDevicePrimaryCtxRetain", c_void_p, drv.device) == drv.context.value
    drv.check("cuDevicePrimaryCtxRelease", drv.device)
    flags, active = ctypes.c_uint(), c_int()
    drv.check("cuDevicePrimaryCtxGetState", drv.device, byref(flags), byref(active))
    assert active.value == 1


def test_device(drv):
    count = drv.get("cuDeviceGetCount", c_int)
    assert count >= 1
    out = c_int()
    assert drv.cuDeviceGet(byref(out), count) == INVALID_DEVICE
    assert drv.get("cuDeviceTotalMem", c_size_t, drv.device) >= drv.total_bytes()
    assert drv.get("cuDeviceGetAttribute", c_int, 102, drv.device) == 1  # virtual memory management
    assert drv.get("cuDeviceGetAttribute", c_int, 18, drv.device) == 0  # integrated


# Reservations


def test_granularity(drv):
    for option in (0, 1):
        properties = byref(drv.properties())
        assert drv.get("cuMemGetAllocationGranularity", c_size_t, properties, option) == PAGE


@pytest.mark.parametrize("alignment", [0, PAGE, 512 * MIB, 64 * GIB, TIB])
def test_reservation_is_aligned(drv, alignment):
    address = drv.reserve(PAGE, alignment)
    assert address % (alignment or PAGE) == 0
    drv.check("cuMemAddressFree", address, PAGE)


def test_reservations_cost_no_memory(drv):
    free = drv.free_bytes()
    address = drv.reserve(16 * TIB)
    assert drv.free_bytes() == free
    drv.check("cuMemAddressFree", address, 16 * TIB)


def test_reservations_of_64_gib_side_by_side(drv):
    size = 64 * GIB
    addresses = [drv.reserve(size, size) for _ in range(100)]
    assert len({address // size for address in addresses}) == 100
    for address in addresses:
        drv.check("cuMemAddressFree", address, size)


def test_reservation_arguments(drv):
    out = ctypes.c_uint64()
    assert drv.cuMemAddressReserve(byref(out), 0, 0, 0, 0) == INVALID_VALUE
    assert drv.cuMemAddressReserve(byref(out), PAGE, 3 * MIB, 0, 0) == INVALID_VALUE
    assert drv.cuMemAddressReserve(byref(out), PAGE, 0, 0, 1) == INVALID_VALUE


def test_reservation_takes_a_free_hint_and_avoids_a_taken_one(drv):
    first = drv.reserve(GIB)
    drv.check("cuMemAddressFree", first, GIB)
    again = drv.reserve(GIB, 0, first)
    assert again == first
    other = drv.reserve(GIB, 0, first)
    assert other + GIB <= first or first + GIB <= other
    drv.check("cuMemAddressFree", other, GIB)
    drv.check("cuMemAddressFree", again, GIB)


def test_reservation_is_freed_whole_and_once(drv):
    address = drv.reserve(4 * PAGE)
    assert drv.cuMemAddressFree(address, 2 * PAGE) == INVALID_VALUE
    assert drv.cuMemAddressFree(address + PAGE, PAGE) == INVALID_VALUE
    drv.check("cuMemAddressFree", address, 4 * PAGE)
    assert drv.cuMemAddressFree(address, 4 * PAGE) == INVALID_VALUE


def test_reservation_with_a_mapping_is_not_freed(drv, mapped):
    address, _ = mapped
    drv.write(address, b"kept")
    assert drv.cuMemAddressFree(address, PAGE) == INVALID_VALUE
    assert drv.read(address, 4) == b"kept"


# Handles


def test_handle_sizes(drv):
    assert drv.try_create(0) == INVALID_VALUE
    assert drv.try_create(PAGE + 4096) == INVALID_VALUE
    assert drv.try_create(PAGE) == SUCCESS


def test_handle_of_an_unknown_device(drv):
    out = ctypes.c_uint64()
    properties = drv.properties(drv.get("cuDeviceGetCount", c_int))
    assert drv.cuMemCreate(byref(out), PAGE, byref(properties), 0) == INVALID_DEVICE


def test_handle_takes_memory_at_once_and_gives_it_back_at_once(drv):
    free = drv.free_bytes()
    handle = drv.create(64 * MIB)
    assert drv.free_bytes() == free - 64 * MIB
    drv.check("cuMemRelease", handle)
    assert drv.free_bytes() == free


def test_released_handle_keeps_its_memory_while_mapped(drv):
    free = drv.free_bytes()
    address, handle = drv.mapped(PAGE)
    drv.write(address, b"alive")
    drv.check("cuMemRelease", handle)
    assert drv.free_bytes() == free - PAGE
    assert drv.read(address, 5) == b"alive"
    drv.check("cuMemUnmap", address, PAGE)
    assert drv.free_bytes() == free
    drv.check("cuMemAddressFree", address, PAGE)


def test_retained_handle(drv):
    free = drv.free_bytes()
    address, handle = drv.mapped(2 * PAGE)
    drv.write(address, b"held")
    retained = drv.get("cuMemRetainAllocationHandle", ctypes.c_uint64, address + PAGE)
    drv.check("cuMemRelease", handle)
    drv.check("cuMemUnmap", address, 2 * PAGE)
    assert drv.free_bytes() == free - 2 * PAGE
    drv.map(address, 2 * PAGE, retained)
    assert drv.read(address, 4) == b"held"
    drv.discard(address, 2 * PAGE, retained)
    assert drv.free_bytes() == free


def test_handle_of_memory_that_was_released_but_is_mapped(drv):
    address, handle = drv.mapped(PAGE)
    drv.check("cuMemRelease", handle)
    retained = drv.get("cuMemRetainAllocationHandle", ctypes.c_uint64, address)
    drv.discard(address, PAGE, retained)


def test_no_handle_of_what_is_not_mapped(drv):
    address = drv.reserve(PAGE)
    out = ctypes.c_uint64()
    assert drv.cuMemRetainAllocationHandle(byref(out), address) == INVALID_VALUE
    drv.check("cuMemAddressFree", address, PAGE)


def test_properties_of_a_handle(drv, mapped):
    properties = drv.properties(0)
    properties.location.id = 99
    drv.check("cuMemGetAllocationPropertiesFromHandle", byref(properties), mapped[1])
    assert (properties.type, properties.location.type) == (1, 1)
    assert properties.location.id == drv.device


def test_fresh_memory_is_zero(drv):
    size = 64 * MIB
    for _ in range(2):
        address, handle = drv.mapped(size)
        assert drv.read(address, size) == bytes(size)
        drv.check("cuMemsetD8", address, 0xAB, size)
        drv.check("cuCtxSynchronize")
        drv.discard(address, size, handle)


def test_device_full_then_not(drv):
    free = drv.free_bytes() // PAGE * PAGE  # it need not be a multiple
    most = free // 10 * 9 // PAGE * PAGE
    handle = drv.create(most)
    too_much = drv.try_create(free - most + GIB)
    a_page = drv.try_create(PAGE)
    drv.check("cuMemRelease", handle)
    assert (too_much, a_page) == (OUT_OF_MEMORY, SUCCESS)
    assert drv.try_create(most) == SUCCESS


# Mappings


def test_map_arguments(drv):
    address, handle = drv.reserve(4 * PAGE), drv.create(2 * PAGE)
    assert drv.cuMemMap(address, 2 * PAGE, PAGE, handle, 0) == NOT_SUPPORTED  # offset
    assert drv.cuMemMap(address, PAGE, 0, handle, 0) == NOT_SUPPORTED  # a part
    assert drv.cuMemMap(address, 4 * PAGE, 0, handle, 0) == NOT_SUPPORTED  # more than there is
    assert drv.cuMemMap(address, 0, 0, handle, 0) == INVALID_VALUE
    if drv.simulated:  # the driver maps beyond a reservation's end where nothing else lies
        assert drv.cuMemMap(address + 3 * PAGE, 2 * PAGE, 0, handle, 0) == INVALID_VALUE
    drv.check("cuMemMap", address, 2 * PAGE, 0, handle, 0)
    drv.check("cuMemUnmap", address, 2 * PAGE)
    drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 4 * PAGE)


def test_mappings_do_not_overlap(drv):
    address, first, second = drv.reserve(4 * PAGE), drv.create(2 * PAGE), drv.create(2 * PAGE)
    drv.map(address, 2 * PAGE, first)
    drv.write(address, b"first")
    assert drv.cuMemMap(address, 2 * PAGE, 0, second, 0) == INVALID_VALUE
    assert drv.cuMemMap(address + PAGE, 2 * PAGE, 0, second, 0) == INVALID_VALUE
    assert drv.read(address, 5) == b"first"
    drv.check("cuMemUnmap", address, 2 * PAGE)
    drv.check("cuMemRelease", first)
    drv.check("cuMemRelease", second)
    drv.check("cuMemAddressFree", address, 4 * PAGE)


def test_two_mappings_of_one_handle_alias(drv):
    address, handle = drv.reserve(2 * PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle)
    drv.map(address + PAGE, PAGE, handle)
    drv.write(address + 100, b"seen twice")
    assert drv.read(address + PAGE + 100, 10) == b"seen twice"
    drv.discard(address, 2 * PAGE, handle)


def test_contents_go_with_the_handle(drv):
    first, second, handle = drv.reserve(PAGE), drv.reserve(PAGE), drv.create(PAGE)
    drv.map(first, PAGE, handle)
    drv.write(first, b"moves")
    drv.check("cuMemUnmap", first, PAGE)
    drv.map(second, PAGE, handle)
    assert drv.read(second, 5) == b"moves"
    drv.discard(second, PAGE, handle)
    drv.check("cuMemAddressFree", first, PAGE)


def test_unmap_takes_whole_mappings(drv):
    address, handles = drv.reserve(6 * PAGE), [drv.create(2 * PAGE) for _ in range(3)]
    for i, handle in enumerate(handles):
        drv.map(address + 2 * i * PAGE, 2 * PAGE, handle)
    drv.write(address, b"whole")
    assert drv.cuMemUnmap(address, PAGE) == INVALID_VALUE
    assert drv.cuMemUnmap(address + PAGE, PAGE) == INVALID_VALUE
    assert drv.cuMemUnmap(address, 3 * PAGE) == INVALID_VALUE
    assert drv.read(address, 5) == b"whole"
    drv.check("cuMemUnmap", address, 4 * PAGE)  # two at once
    assert drv.cuMemUnmap(address, 2 * PAGE) == SUCCESS  # again: nothing is there
    drv.check("cuMemUnmap", address + 4 * PAGE, 2 * PAGE)
    for handle in handles:
        drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 6 * PAGE)


def test_unmap_over_a_hole(drv):
    address, handles = drv.reserve(3 * PAGE), [drv.create(PAGE) for _ in range(2)]
    drv.map(address, PAGE, handles[0])
    drv.map(address + 2 * PAGE, PAGE, handles[1])
    assert drv.cuMemUnmap(address, 3 * PAGE) == SUCCESS
    drv.check("cuMemUnmap", address, PAGE)  # whatever that took
    drv.check("cuMemUnmap", address + 2 * PAGE, PAGE)
    for handle in handles:
        drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 3 * PAGE)


def test_unmap_of_what_was_never_mapped(drv):
    address = drv.reserve(PAGE)
    assert drv.cuMemUnmap(address, PAGE) == SUCCESS
    drv.check("cuMemAddressFree", address, PAGE)


# Access


def test_access_is_for_mapped_ranges(drv):
    address = drv.reserve(3 * PAGE)
    assert drv.set_access(address, PAGE) == INVALID_VALUE
    handles = [drv.create(PAGE) for _ in range(2)]
    drv.map(address, PAGE, handles[0], access=False)
    drv.map(address + 2 * PAGE, PAGE, handles[1], access=False)
    assert drv.set_access(address, 3 * PAGE) == SUCCESS  # it stops at the hole
    assert drv.get_access(address) == READ_WRITE
    assert drv.get_access(address + 2 * PAGE) == 0
    drv.check("cuMemUnmap", address, PAGE)
    drv.check("cuMemUnmap", address + 2 * PAGE, PAGE)
    for handle in handles:
        drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 3 * PAGE)


def test_access_over_many_handles_at_once(drv):
    count = 64
    address, handles = drv.reserve(count * PAGE), [drv.create(PAGE) for _ in range(count)]
    for i, handle in enumerate(handles):
        drv.map(address + i * PAGE, PAGE, handle, access=False)
    assert drv.set_access(address, count * PAGE) == SUCCESS
    drv.check("cuMemsetD8", address, 7, count * PAGE)
    assert drv.read(address + count * PAGE - 4, 4) == b"\7\7\7\7"
    drv.discard(address, count * PAGE, *handles)


def test_access_can_be_asked_for(drv):
    address, handle = drv.reserve(PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle, access=False)
    assert drv.get_access(address) == 0
    assert drv.set_access(address, PAGE) == SUCCESS
    assert drv.get_access(address) == READ_WRITE
    drv.check("cuMemUnmap", address, PAGE)
    drv.map(address, PAGE, handle, access=False)
    assert drv.get_access(address) == 0  # it went with the mapping
    drv.discard(address, PAGE, handle)


def test_access_of_an_unknown_device(drv, mapped):
    assert drv.set_access(mapped[0], PAGE, device=63) == INVALID_VALUE
    assert drv.read(mapped[0], 1) == b"\0"


def test_memory_without_access_is_refused_at_once_and_nothing_breaks(drv):
    address, handle = drv.reserve(2 * PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle, access=False)
    buffer = ctypes.create_string_buffer(64)
    for place in (address, address + PAGE):  # mapped, reserved
        assert drv.cuMemsetD8(place, 1, 64) == INVALID_VALUE
        assert drv.cuMemcpyDtoH(ctypes.addressof(buffer), place, 64) == INVALID_VALUE
    drv.check("cuCtxSynchronize")
    drv.set_access(address, PAGE)
    assert drv.read(address, 4) == bytes(4)
    drv.discard(address, 2 * PAGE, handle)


# Work in flight

WAITS = {"cuMemFree of 512 B", "cuMemFree of 4 MiB", "cuMemFreeHost", "cuMemHostUnregister"}
# Nothing relies on whether these wait, nor on what a capture does to a thread in the default mode.
NOT_ASSERTED = {"cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload"}


def ready_call(drv, name):
    """(The call, what clears up after it): everything that it needs is made."""
    make = CALLS[name]
    if make in NEEDS and not drv.has(NEEDS[make]):
        pytest.skip(f"the driver does not have {NEEDS[make]}")
    steps = make(drv)
    call = next(steps)
    return call, lambda code: finish(call, steps, code)


@pytest.mark.parametrize("name", sorted(WAITS))
def test_what_waits_for_all_work_of_the_device(drv, mapped, streams, name):
    stream = streams()
    call, clear_up = ready_call(drv, name)
    drv.host_function(stream, lambda: time.sleep(0.1))
    drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
    code = call()
    assert drv.cuStreamQuery(stream) == SUCCESS
    clear_up(code)
    assert code == SUCCESS


@pytest.mark.parametrize("name", sorted(set(CALLS) - WAITS - NOT_ASSERTED))
def test_what_does_not_wait(drv, mapped, streams, name):
    stream = streams()
    call, clear_up = ready_call(drv, name)
    with drv.gate(stream) as gate:
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
        gate.entered.wait(5)
        code = in_thread(drv, call, timeout=3)
        assert drv.cuStreamQuery(stream) == NOT_READY
    drv.check("cuStreamSynchronize", stream)
    clear_up(code)
    assert code == SUCCESS


def test_destroying_a_stream_does_not_wait_for_its_work(drv):
    stream, event, done = drv.stream(), drv.event(), []
    with drv.gate(stream) as gate:
        drv.host_function(stream, lambda: done.append(1))
        drv.check("cuEventRecord", event, stream)
        gate.entered.wait(5)
        in_thread(drv, lambda: drv.check("cuStreamDestroy", stream), timeout=3)
        assert done == []
    drv.check("cuEventSynchronize", event)
    assert done == [1]
    drv.check("cuEventDestroy", event)


def test_unmap_and_release_do_not_wait_for_streams(drv, mapped, streams):
    stream = streams()
    address, handle = drv.mapped(PAGE)
    with drv.gate(stream) as gate:
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
        gate.entered.wait(5)
        in_thread(drv, lambda: drv.discard(address, PAGE, handle), timeout=3)
        assert drv.cuStreamQuery(stream) == NOT_READY
    drv.check("cuStreamSynchronize", stream)


def test_mapping_calls_do_not_wait_for_streams(drv, mapped, streams):
    stream = streams()
    with drv.gate(stream) as gate:
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
        gate.entered.wait(5)
        address, handle = in_thread(drv, lambda: drv.mapped(PAGE), timeout=3)
        assert drv.cuStreamQuery(stream) == NOT_READY
    drv.check("cuStreamSynchronize", stream)
    drv.discard(address, PAGE, handle)


def test_stream_runs_in_order(drv, mapped, streams):
    stream = streams()
    for value in range(20):
        drv.check("cuMemsetD8Async", mapped[0], value, PAGE, stream)
    drv.check("cuStreamSynchronize", stream)
    assert drv.read(mapped[0] + PAGE - 1, 1) == bytes([19])


def test_legacy_stream_waits_for_blocking_streams(drv, mapped, streams):
    stream, event = streams(0), drv.event()
    with drv.gate(stream) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8", mapped[0], 1, PAGE)  # the legacy stream
        drv.check("cuEventRecord", event, LEGACY)
        time.sleep(0.05)
        assert drv.cuEventQuery(event) == NOT_READY
    drv.check("cuEventSynchronize", event)
    drv.check("cuEventDestroy", event)


def test_blocking_streams_wait_for_the_legacy_stream(drv, mapped, streams):
    blocking, apart = streams(0), streams()
    with drv.gate(None) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, blocking)
        time.sleep(0.05)
        assert drv.cuStreamQuery(blocking) == NOT_READY
        assert drv.cuStreamQuery(apart) == SUCCESS
    drv.check("cuStreamSynchronize", blocking)


def test_non_blocking_streams_and_the_legacy_stream_pass_each_other(drv, mapped, streams):
    apart = streams()
    with drv.gate(None) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8Async", mapped[0], 3, PAGE, apart)
        in_thread(drv, lambda: drv.check("cuStreamSynchronize", apart), timeout=3)
    drv.check("cuStreamSynchronize", None)
    with drv.gate(apart) as gate:
        gate.entered.wait(5)
        assert in_thread(drv, lambda: drv.read(mapped[0], 1), timeout=3) == b"\3"
        in_thread(drv, lambda: drv.check("cuStreamSynchronize", LEGACY), timeout=3)
    drv.check("cuStreamSynchronize", apart)


def test_per_thread_stream_is_a_blocking_stream(drv, mapped):
    with drv.gate(None) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, PER_THREAD)
        time.sleep(0.05)
        assert drv.cuStreamQuery(PER_THREAD) == NOT_READY
    drv.check("cuStreamSynchronize", PER_THREAD)


def test_context_waits_for_every_stream(drv, mapped, streams):
    done = []
    for flags in (0, NON_BLOCKING):
        drv.host_function(streams(flags), lambda: (time.sleep(0.1), done.append(1)))
    drv.check("cuCtxSynchronize")
    assert len(done) == 2


def test_events_order_streams(drv, mapped, streams):
    first, second, event = streams(), streams(), drv.event()
    with drv.gate(first) as gate:
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, first)
        drv.check("cuEventRecord", event, first)
        drv.check("cuStreamWaitEvent", second, event, 0)
        drv.check("cuMemsetD8Async", mapped[0], 2, PAGE, second)
        gate.entered.wait(5)
        time.sleep(0.05)
        assert drv.cuEventQuery(event) == NOT_READY
        assert drv.cuStreamQuery(second) == NOT_READY
    drv.check("cuStreamSynchronize", second)
    assert drv.cuEventQuery(event) == SUCCESS
    assert drv.read(mapped[0], 1) == b"\2"
    drv.check("cuEventDestroy", event)


def test_event_never_recorded_is_complete(drv, streams):
    event = drv.event()
    assert drv.cuEventQuery(event) == SUCCESS
    drv.check("cuStreamWaitEvent", streams(), event, 0)
    drv.check("cuEventSynchronize", event)
    drv.check("cuEventDestroy", event)


def test_elapsed_time(drv, streams):
    stream, start, end = streams(), drv.event(), drv.event()
    drv.check("cuEventRecord", start, stream)
    drv.host_function(stream, lambda: time.sleep(0.1))
    drv.check("cuEventRecord", end, stream)
    out = c_float()
    assert drv.cuEventElapsedTime(byref(out), start, end) == NOT_READY
    drv.check("cuEventSynchronize", end)
    drv.check("cuEventElapsedTime", byref(out), start, end)
    assert 90 <= out.value < 5000
    drv.check("cuEventDestroy", start)
    drv.check("cuEventDestroy", end)


def test_destroyed_stream_completes_its_work(drv, mapped):
    stream, event = drv.stream(), drv.event()
    drv.host_function(stream, lambda: time.sleep(0.05))
    drv.check("cuMemsetD8Async", mapped[0], 9, PAGE, stream)
    drv.check("cuEventRecord", event, stream)
    drv.check("cuStreamDestroy", stream)
    drv.check("cuEventSynchronize", event)
    assert drv.read(mapped[0], 1) == b"\x09"
    drv.check("cuEventDestroy", event)


# Copies and host memory


def test_copies_across_handles(drv):
    address, handles = drv.reserve(3 * PAGE), [drv.create(PAGE) for _ in range(3)]
    for i, handle in enumerate(handles):
        drv.map(address + i * PAGE, PAGE, handle)
    data = os.urandom(PAGE + 12345)
    drv.write(address + 777, data)
    assert drv.read(address + 777, len(data)) == data
    drv.check("cuMemcpyDtoD", address + 2 * PAGE - 100, address + 777, 4096)
    assert drv.read(address + 2 * PAGE - 100, 4096) == data[:4096]
    drv.discard(address, 3 * PAGE, *handles)


def test_set_of_words(drv, mapped):
    drv.check("cuMemsetD32", mapped[0] + 8, 0x01020304, 3)
    assert drv.read(mapped[0], 24) == bytes(8) + bytes([4, 3, 2, 1] * 3) + bytes(4)
    assert drv.cuMemsetD32(mapped[0] + 2, 0, 1) == INVALID_VALUE


def test_pageable_copy_is_complete_when_the_call_returns(drv, mapped, streams):
    stream = streams()
    drv.host_function(stream, lambda: time.sleep(0.1))
    drv.check("cuMemsetD8Async", mapped[0], 5, PAGE, stream)
    buffer = ctypes.create_string_buffer(PAGE)
    drv.check("cuMemcpyDtoHAsync", ctypes.addressof(buffer), mapped[0], PAGE, stream)
    assert buffer.raw == b"\5" * PAGE


def test_pinned_copy_returns_before_it_is_complete(drv, mapped, streams):
    stream, pinned = streams(), drv.pinned(PAGE)
    ctypes.memset(pinned, 1, PAGE)
    with drv.gate(stream) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8Async", mapped[0], 2, PAGE, stream)
        drv.check("cuMemcpyDtoHAsync", pinned, mapped[0], PAGE, stream)
        assert ctypes.string_at(pinned, 4) == b"\1" * 4
        assert drv.cuStreamQuery(stream) == NOT_READY
    drv.check("cuStreamSynchronize", stream)
    assert ctypes.string_at(pinned, PAGE) == b"\2" * PAGE
    drv.check("cuMemcpyHtoDAsync", mapped[0], pinned, PAGE, stream)
    drv.check("cuStreamSynchronize", stream)
    drv.check("cuMemFreeHost", pinned)


def test_copy_of_registered_memory(drv, mapped, streams):
    stream, memory = streams(), ctypes.create_string_buffer(3 * PAGE)
    address = (ctypes.addressof(memory) + PAGE - 1) // PAGE * PAGE
    drv.check("cuMemHostRegister", address, PAGE, 0)
    ctypes.memset(address, 3, PAGE)
    drv.check("cuMemcpyHtoDAsync", mapped[0], address, PAGE, stream)
    drv.check("cuStreamSynchronize", stream)
    assert drv.read(mapped[0] + PAGE - 1, 1) == b"\3"
    drv.check("cuMemHostUnregister", address)


def test_registration_rules(drv):
    memory = ctypes.create_string_buffer(6 * PAGE)
    address = (ctypes.addressof(memory) + PAGE - 1) // PAGE * PAGE
    assert drv.cuMemHostUnregister(address) == NOT_REGISTERED
    drv.check("cuMemHostRegister", address, 2 * PAGE, 0)
    assert drv.cuMemHostRegister(address, 2 * PAGE, 0) == ALREADY_REGISTERED
    assert drv.cuMemHostRegister(address + PAGE, 2 * PAGE, 0) == ALREADY_REGISTERED
    drv.check("cuMemHostRegister", address + 2 * PAGE, PAGE, 0)  # a neighbour
    assert drv.cuMemHostUnregister(address + PAGE) != SUCCESS  # not its beginning
    drv.check("cuMemHostUnregister", address + 2 * PAGE)
    drv.check("cuMemHostUnregister", address)
    assert drv.cuMemHostUnregister(address) == NOT_REGISTERED


def test_host_memory_is_freed_once(drv):
    address = drv.pinned(4096)
    drv.check("cuMemFreeHost", address)
    assert drv.cuMemFreeHost(address) == INVALID_VALUE


def test_host_memory_of_no_size(drv):
    out = c_void_p()
    assert drv.cuMemHostAlloc(byref(out), 0, 0) == SUCCESS
    assert drv.cuMemFreeHost(out.value or 0) == SUCCESS


def test_plain_allocation(drv):
    out = ctypes.c_uint64()
    assert drv.cuMemAlloc(byref(out), 0) == INVALID_VALUE
    free = drv.free_bytes()
    address = drv.get("cuMemAlloc", ctypes.c_uint64, 64 * MIB)
    assert drv.free_bytes() == free - 64 * MIB
    drv.write(address + 5, b"plain")
    assert drv.read(address + 5, 5) == b"plain"
    assert drv.cuMemUnmap(address, 64 * MIB) != SUCCESS
    drv.check("cuMemFree", address)
    assert drv.free_bytes() == free
    assert drv.cuMemFree(address) == INVALID_VALUE


def test_plain_allocation_of_more_than_there_is(drv):
    out = ctypes.c_uint64()
    assert drv.cuMemAlloc(byref(out), drv.total_bytes() + GIB) == OUT_OF_MEMORY


def test_pointer_attributes(drv, mapped):
    memory_type, ordinal = 2, 9
    for address in (mapped[0], mapped[0] + PAGE - 1):
        assert drv.get("cuPointerGetAttribute", ctypes.c_uint, memory_type, address) == 2
        assert drv.get("cuPointerGetAttribute", c_int, ordinal, address) == drv.device
    pinned = drv.pinned(4096)
    assert drv.get("cuPointerGetAttribute", ctypes.c_uint, memory_type, pinned) == 1
    assert drv.get("cuPointerGetAttribute", c_void_p, 1, pinned) == drv.context.value
    drv.check("cuMemFreeHost", pinned)
    out, buffer = c_int(), ctypes.create_string_buffer(8)
    unknown = ctypes.addressof(buffer)
    assert drv.cuPointerGetAttribute(byref(out), memory_type, unknown) == INVALID_VALUE


def test_pci_bus_id(drv):
    text = ctypes.create_string_buffer(32)
    drv.check("cuDeviceGetPCIBusId", text, 32, drv.device)
    found = re.fullmatch(
        r"([0-9a-fA-F]{4}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.0", text.value.decode()
    )
    assert found, text.value
    domain, bus, device = (
        drv.get("cuDeviceGetAttribute", c_int, name, drv.device) for name in (50, 33, 34)
    )
    assert [int(part, 16) for part in found.groups()] == [domain, bus, device]
    if drv.simulated:
        assert drv.cuDeviceGetPCIBusId(text, 4, drv.device) == INVALID_VALUE
    count = drv.get("cuDeviceGetCount", c_int)
    assert drv.cuDeviceGetPCIBusId(text, 32, count) == INVALID_DEVICE


def test_small_blocks_share_memory(drv):
    found = in_child(drv.path, many_small_blocks)
    assert found == {"taken by 100 of 512 B": PAGE, "kept after": 0}


# Modules and launches, of the library's own kernel

PIECES = [(0, 65536), (16, 4096), (65536, 1), (70003, 1000), (0, 0)]  # offset, bytes
DATA = bytes(range(251)) * 300


class Kernel:
    """The kernel loaded, memory with contents, and the host memory of a launch."""

    def __init__(self, drv: Driver, flags: int = 0):
        self.drv, self.module = drv, drv.module()
        self.kernel = drv.kernel(self.module)
        self.memory = ctypes.create_string_buffer(2 * PAGE)
        self.host = (ctypes.addressof(self.memory) + 4095) // 4096 * 4096
        drv.check("cuMemHostRegister", self.host, 8192, flags)
        self.pieces = drv.get("cuMemHostGetDevicePointer", ctypes.c_uint64, self.host, 0)
        self.address, self.handle = drv.mapped(PAGE)
        drv.write(self.address, DATA)
        flat = [n for at, size in PIECES for n in (self.address + at, size)]
        (ctypes.c_uint64 * len(flat)).from_address(self.host)[:] = flat

    def launch(self, stream) -> int:
        return self.drv.launch(self.kernel, self.pieces, self.pieces + 4096, len(PIECES), stream)

    def found(self) -> list[bytes]:
        text = ctypes.string_at(self.host + 4096, 32 * len(PIECES))
        return [text[at : at + 32] for at in range(0, len(text), 32)]

    def expected(self, data: bytes = DATA) -> list[bytes]:
        return [digest(data[at : at + size]) for at, size in PIECES]

    def close(self) -> None:
        self.drv.discard(self.address, PAGE, self.handle)
        self.drv.check("cuMemHostUnregister", self.host)
        self.drv.check("cuModuleUnload", self.module)


@pytest.fixture
def kernel(drv):
    made = Kernel(drv)
    yield made
    made.close()


# PORTABLE 1, DEVICEMAP 2
@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_a_kernel_reads_and_writes_registered_memory(drv, streams, flags):
    kernel, stream = Kernel(drv, flags), streams()
    assert kernel.launch(stream) == SUCCESS
    drv.check("cuStreamSynchronize", stream)
    found = kernel.found()
    kernel.close()
    assert found == kernel.expected()


def test_a_launch_is_in_order_and_does_not_wait(drv, kernel, streams):
    stream, event = streams(), drv.event()
    with drv.gate(stream) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8Async", kernel.address, 7, PAGE, stream)
        assert in_thread(drv, lambda: kernel.launch(stream), timeout=3) == SUCCESS
        drv.check("cuEventRecord", event, stream)
        assert drv.cuStreamQuery(stream) == NOT_READY
        assert kernel.found() == [bytes(32)] * len(PIECES)
    drv.check("cuEventSynchronize", event)
    assert kernel.found() == kernel.expected(b"\7" * PAGE)
    drv.check("cuEventDestroy", event)


def test_what_a_module_does_not_have(drv):
    module, out = drv.module(), c_void_p()
    assert drv.cuModuleGetFunction(byref(out), module, b"no_such_kernel") == NOT_FOUND
    drv.check("cuModuleUnload", module)


def test_a_module_of_garbage(drv):
    with pytest.raises(DriverError) as failed:
        drv.module(b"garbage")  # a text: the driver takes it for PTX
    assert failed.value.code in (INVALID_IMAGE, INVALID_PTX)


def test_host_memory_that_is_not_pinned_has_no_device_address(drv):
    out, memory = ctypes.c_uint64(), ctypes.create_string_buffer(4096)
    address = ctypes.addressof(memory)
    assert drv.cuMemHostGetDevicePointer(byref(out), address, 0) == INVALID_VALUE


def test_a_captured_launch_runs_when_the_graph_does(drv, kernel, streams):
    stream, graph, executable = streams(), c_void_p(), c_void_p()
    drv.check("cuStreamBeginCapture", stream, RELAXED)
    assert kernel.launch(stream) == SUCCESS
    drv.check("cuStreamEndCapture", stream, byref(graph))
    assert kernel.found() == [bytes(32)] * len(PIECES)
    drv.check("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
    drv.check("cuGraphDestroy", graph)
    for value in (1, 2):
        drv.check("cuMemsetD8Async", kernel.address, value, PAGE, stream)
        drv.check("cuGraphLaunch", executable, stream)
        drv.check("cuStreamSynchronize", stream)
        assert kernel.found() == kernel.expected(bytes([value]) * PAGE)
    drv.check("cuGraphExecDestroy", executable)


# Captures


class Bench:
    """A capture on one non-blocking stream, and what the forbidden calls need, made before."""

    def __init__(self, drv: Driver, mode: int):
        self.drv = drv
        self.address, self.handle = drv.mapped(PAGE)
        self.spare = drv.create(PAGE)
        self.range = drv.reserve(2 * PAGE)
        drv.map(self.range + PAGE, PAGE, self.spare)
        self.pinned = drv.pinned(PAGE)
        self.block = drv.get("cuMemAlloc", ctypes.c_uint64, PAGE)
        self.other, self.stream = drv.stream(), drv.stream()
        self.event = drv.event()
        drv.check("cuEventRecord", self.event, self.other)
        drv.check("cuStreamSynchronize", self.other)
        drv.check("cuStreamBeginCapture", self.stream, mode)
        drv.check("cuMemsetD8Async", self.address, 1, PAGE, self.stream)

    def outcome(self, call, in_other_thread=False):
        """(code of the call, code of ending the capture)."""
        run = (
            (lambda: call(self))
            if not in_other_thread
            else (lambda: in_thread(self.drv, lambda: call(self)))
        )
        try:
            code = run()
        finally:
            ended = self.end()
        return code, ended

    def end(self) -> int:
        drv, graph = self.drv, c_void_p()
        drv.thread_mode(GLOBAL)
        code = drv.cuStreamEndCapture(self.stream, byref(graph))
        if code == SUCCESS:
            drv.check("cuGraphDestroy", graph)
        drv.check("cuStreamSynchronize", self.other)
        drv.check("cuEventDestroy", self.event)
        drv.check("cuStreamDestroy", self.other)
        drv.check("cuStreamDestroy", self.stream)
        if self.block:
            drv.check("cuMemFree", self.block)
        drv.check("cuMemFreeHost", self.pinned)
        drv.check("cuMemUnmap", self.range + PAGE, PAGE)
        drv.check("cuMemRelease", self.spare)
        drv.check("cuMemAddressFree", self.range, 2 * PAGE)
        drv.discard(self.address, PAGE, self.handle)
        return code


def host_alloc(bench):
    out = c_void_p()
    code = bench.drv.cuMemHostAlloc(byref(out), 4096, 0)
    if code == SUCCESS:
        previous = bench.drv.thread_mode(RELAXED)
        bench.drv.check("cuMemFreeHost", out.value)
        bench.drv.thread_mode(previous)
    return code


def alloc(bench):
    out = ctypes.c_uint64()
    code = bench.drv.cuMemAlloc(byref(out), PAGE)
    if code == SUCCESS:
        previous = bench.drv.thread_mode(RELAXED)
        bench.drv.check("cuMemFree", out.value)
        bench.drv.thread_mode(previous)
    return code


def free_block(bench):
    code = bench.drv.cuMemFree(bench.block)
    if code == SUCCESS:
        bench.block = 0
    return code


FORBIDDEN = {
    "cuMemHostAlloc": host_alloc,
    "cuMemAlloc": alloc,
    "cuMemFree": free_block,
    "cuStreamSynchronize-other": lambda bench: bench.drv.cuStreamSynchronize(bench.other),
    "cuStreamSynchronize-legacy": lambda bench: bench.drv.cuStreamSynchronize(LEGACY),
    "cuStreamQuery-other": lambda bench: bench.drv.cuStreamQuery(bench.other),
    "cuEventSynchronize": lambda bench: bench.drv.cuEventSynchronize(bench.event),
}


def mapping_calls(bench):
    """Everything that a pause and a resume do to addresses and handles."""
    drv = bench.drv
    handle, address = drv.create(PAGE), drv.reserve(PAGE)
    drv.map(address, PAGE, handle)
    drv.check("cuMemUnmap", address, PAGE)
    drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, PAGE)
    drv.free_bytes()
    return SUCCESS


def stream_and_event(bench):
    drv = bench.drv
    stream, event = drv.stream(), drv.event()
    drv.check("cuEventDestroy", event)
    drv.check("cuStreamDestroy", stream)
    return SUCCESS


def read_synchronously(bench):
    bench.drv.read(bench.range + PAGE, 64)
    return SUCCESS


def legacy_is_capturing(bench):
    return bench.drv.capture_status(LEGACY)  # 0: not


ALLOWED = {
    "mapping": mapping_calls,
    "copy-on-another-stream": lambda bench: bench.drv.cuMemcpyDtoHAsync(
        bench.pinned, bench.range + PAGE, PAGE, bench.other
    ),
    "set-on-another-stream": lambda bench: bench.drv.cuMemsetD8Async(
        bench.range + PAGE, 1, PAGE, bench.other
    ),
    "synchronous-copy": read_synchronously,
    "streams-and-events": stream_and_event,
    "is-capturing-legacy": legacy_is_capturing,
}

MODES = pytest.mark.parametrize(
    "mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"]
)


@MODES
@pytest.mark.parametrize("name", FORBIDDEN)
def test_calls_that_a_capture_forbids(drv, name, mode):
    expected = (SUCCESS, SUCCESS) if mode == RELAXED else (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)
    assert Bench(drv, mode).outcome(FORBIDDEN[name]) == expected


@MODES
@pytest.mark.parametrize("name", FORBIDDEN)
def test_relaxed_threads_may_make_them(drv, name, mode):
    bench = Bench(drv, mode)
    assert drv.thread_mode(RELAXED) == GLOBAL
    assert bench.outcome(FORBIDDEN[name]) == (SUCCESS, SUCCESS)


@MODES
def test_other_threads_are_bound_by_global_captures_alone(drv, mode):
    expected = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED) if mode == GLOBAL else (SUCCESS, SUCCESS)
    assert Bench(drv, mode).outcome(host_alloc, in_other_thread=True) == expected


@MODES
def test_relaxed_other_threads_are_not_bound(drv, mode):
    def relaxed(bench):
        bench.drv.thread_mode(RELAXED)
        return host_alloc(bench)

    assert Bench(drv, mode).outcome(relaxed, in_other_thread=True) == (SUCCESS, SUCCESS)


@MODES
@pytest.mark.parametrize("name", ALLOWED)
def test_calls_that_leave_a_capture_alone(drv, name, mode):
    assert Bench(drv, mode).outcome(ALLOWED[name]) == (SUCCESS, SUCCESS)


def find_fingerprints(bench):
    """All that finding fingerprints asks of the driver, on a thread in relaxed mode."""
    drv = bench.drv
    previous = drv.thread_mode(RELAXED)
    kernel, stream, event = Kernel(drv), drv.stream(), drv.event()
    code = kernel.launch(stream)
    drv.check("cuEventRecord", event, stream)
    drv.check("cuEventSynchronize", event)
    assert kernel.found() == kernel.expected()
    drv.check("cuEventDestroy", event)
    drv.check("cuStreamDestroy", stream)
    kernel.close()
    drv.thread_mode(previous)
    return code


@MODES
@pytest.mark.parametrize("in_other_thread", [False, True], ids=["same", "other"])
def test_relaxed_threads_may_load_and_launch(drv, mode, in_other_thread):
    assert Bench(drv, mode).outcome(find_fingerprints, in_other_thread) == (SUCCESS, SUCCESS)


FORBIDDEN_TO_DEFAULT_THREADS = WAITS | {
    "cuMemHostRegister",
    "cuEventQuery",
    "cuCtxRecordEvent",
    "cuMemPoolTrimTo of the default pool",
    "cuMemAlloc of 512 B",
    "cuMemAlloc of 4 MiB",
    "cuMemHostAlloc",
    "cuStreamSynchronize of the legacy stream",
}
FORBIDDEN_TO_ALL_THREADS = {"cuCtxRecordEvent"}


@pytest.mark.parametrize(
    ("thread_mode", "forbidden"),
    [(GLOBAL, FORBIDDEN_TO_DEFAULT_THREADS), (RELAXED, FORBIDDEN_TO_ALL_THREADS)],
    ids=["default", "relaxed-thread"],
)
@pytest.mark.parametrize("name", sorted(set(CALLS) - NOT_ASSERTED))
def test_calls_under_a_global_capture(drv, mapped, streams, name, thread_mode, forbidden):
    stream, graph = streams(), c_void_p()
    call, clear_up = ready_call(drv, name)
    drv.check("cuStreamBeginCapture", stream, GLOBAL)
    drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
    previous = drv.thread_mode(thread_mode)
    code = call()
    drv.thread_mode(previous)
    ended = drv.cuStreamEndCapture(stream, byref(graph))
    if graph:
        drv.check("cuGraphDestroy", graph)
    clear_up(code)
    expected = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED) if name in forbidden else (0, 0)
    assert (code, ended) == expected


@MODES
@pytest.mark.parametrize("thread_mode", [GLOBAL, RELAXED], ids=["default", "relaxed-thread"])
@pytest.mark.parametrize("in_other_thread", [False, True], ids=["same", "other"])
def test_context_wait_breaks_every_capture(drv, mode, thread_mode, in_other_thread):
    def synchronize(bench):
        bench.drv.thread_mode(thread_mode)
        return bench.drv.cuCtxSynchronize()

    outcome = Bench(drv, mode).outcome(synchronize, in_other_thread)
    assert outcome == (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)


def test_wait_for_the_capturing_stream_itself(drv, streams):
    stream, graph = streams(), c_void_p()
    drv.check("cuStreamBeginCapture", stream, RELAXED)
    assert drv.capture_status(stream) == 1
    assert drv.cuStreamSynchronize(stream) == CAPTURE_UNSUPPORTED
    assert drv.capture_status(stream) == 2
    assert drv.cuStreamEndCapture(stream, byref(graph)) == CAPTURE_INVALIDATED
    assert drv.capture_status(stream) == 0


def test_capture_ends_in_the_thread_that_began_it(drv, streams):
    stream = streams()
    for mode in (GLOBAL, THREAD_LOCAL):
        graph = c_void_p()
        drv.check("cuStreamBeginCapture", stream, mode)
        code = in_thread(drv, lambda out=graph: drv.cuStreamEndCapture(stream, byref(out)))
        assert code == WRONG_THREAD
        drv.cuStreamEndCapture(stream, byref(graph))
        if graph:
            drv.check("cuGraphDestroy", graph)


def test_legacy_work_under_the_capture_of_a_blocking_stream(drv, mapped, streams):
    stream, graph = streams(0), c_void_p()
    drv.check("cuStreamBeginCapture", stream, RELAXED)
    assert drv.cuMemsetD8Async(mapped[0], 1, PAGE, LEGACY) == CAPTURE_IMPLICIT
    assert drv.cuStreamEndCapture(stream, byref(graph)) == CAPTURE_INVALIDATED


def test_event_inside_a_capture(drv, streams):
    stream, event, graph = streams(), drv.event(), c_void_p()
    drv.check("cuStreamBeginCapture", stream, RELAXED)
    drv.check("cuEventRecord", event, stream)
    assert drv.cuEventQuery(event) == CAPTURED_EVENT
    drv.cuStreamEndCapture(stream, byref(graph))
    if graph:
        drv.check("cuGraphDestroy", graph)
    drv.check("cuEventDestroy", event)


def test_event_from_outside_a_capture(drv, streams):
    stream, other, event, graph = streams(), streams(), drv.event(), c_void_p()
    drv.check("cuEventRecord", event, other)
    drv.check("cuStreamBeginCapture", stream, RELAXED)
    assert drv.cuStreamWaitEvent(stream, event, 0) == CAPTURE_ISOLATION
    assert drv.cuStreamEndCapture(stream, byref(graph)) == CAPTURE_INVALIDATED
    drv.check("cuEventDestroy", event)


def test_graph_replays_on_memory_behind_the_same_addresses(drv, streams):
    stream, graph, executable = streams(), c_void_p(), c_void_p()
    address, handle = drv.mapped(2 * PAGE)
    calls = []
    drv.check("cuStreamBeginCapture", stream, RELAXED)
    drv.check("cuMemsetD8Async", address, 6, PAGE, stream)
    drv.check("cuMemcpyDtoDAsync", address + PAGE, address, PAGE, stream)
    drv.host_function(stream, lambda: calls.append(1))
    drv.check("cuStreamEndCapture", stream, byref(graph))
    assert drv.read(address + PAGE, 1) == b"\0"
    drv.check("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
    drv.check("cuGraphDestroy", graph)
    for _ in range(2):
        drv.check("cuGraphLaunch", executable, stream)
        drv.check("cuStreamSynchronize", stream)
        assert drv.read(address + 2 * PAGE - 1, 1) == b"\6"
        drv.check("cuMemUnmap", address, 2 * PAGE)
        drv.check("cuMemRelease", handle)
        handle = drv.create(2 * PAGE)
        drv.map(address, 2 * PAGE, handle)
        assert drv.read(address + 2 * PAGE - 1, 1) == b"\0"
    assert len(calls) == 2
    drv.check("cuGraphExecDestroy", executable)
    drv.discard(address, 2 * PAGE, handle)


# Answers to questions.py, where each is asked in a process of its own

ANSWERS = {
    "reservation aligned to": "64 GiB 0 aligned, 1024 GiB 0 aligned",
    "reservation of 4 KiB": INVALID_VALUE,
    "one handle mapped at two addresses, access to both": [SUCCESS, SUCCESS, SUCCESS],
    "map a part of a handle": NOT_SUPPORTED,
    "map where nothing is reserved": INVALID_VALUE,
    "across two neighbouring reservations": {"map": 0, "set access": 0, "unmap": 0},
    "unmap first half, second half; read; unmap whole": [INVALID_VALUE, INVALID_VALUE, 0, 0],
    "unmap over a hole; then the parts": [SUCCESS, SUCCESS, SUCCESS],
    "free a reservation with a mapping; unmap; free": [INVALID_VALUE, SUCCESS, SUCCESS],
    "access over a hole": {"code": SUCCESS, "rights": [READ_WRITE, 0]},
    "access to half of a mapping": {"code": INVALID_VALUE, "rights": [0, 0]},
    "access read-only": {"code": SUCCESS, "rights": READ},
    "access taken away": {"code": SUCCESS, "rights": 0},
    "access for an unknown device": INVALID_VALUE,
    "free of null": {"cuMemFree": SUCCESS, "cuMemFreeHost": SUCCESS},
    "set memory that is reserved only": {"at once": 1, "later": 0, "the next set": 0},
    "set mapped memory without access": {"at once": 1, "later": 0, "the next set": 0},
    "copy mapped memory without access": {
        "mapped": INVALID_VALUE,
        "reserved": INVALID_VALUE,
        "later": SUCCESS,
        "the next set": SUCCESS,
    },
    "unmap under a queued set": {
        "submit": SUCCESS,
        "unmap": SUCCESS,
        "synchronize": ILLEGAL_ADDRESS,
        "then cuMemGetInfo": ILLEGAL_ADDRESS,
        "cuMemCreate": SUCCESS,
        "cuMemUnmap": SUCCESS,
        "cuMemRelease": SUCCESS,
        "cuMemAddressFree": SUCCESS,
        "cuMemRelease of the unmapped": SUCCESS,
    },
    "mapping calls without a context": {
        situation: dict.fromkeys(
            ("reserve", "create", "map", "access", "pointer", "unmap", "release", "free"), SUCCESS
        )
        for situation in ("no context at all", "retained, none current")
    },
    "primary context released under a mapping": {"read": 0, "found": "kept", "unmap": 0},
    "pointer attributes": {
        **{
            f"{place} {name}": value
            for place in ("accessible", "no access")
            for name, value in {
                "context": "null",
                "type": 2,
                "ordinal": 0,
                "range start": "reservation +0",
                "range size": 4 * PAGE,  # the reservation's
                "mapped": 1,
            }.items()
        },
        **{
            f"reserved {name}": "code 1"
            for name in ("context", "type", "ordinal", "range start", "range size", "mapped")
        },
    },
    "register pinned memory": {
        "register pinned": INVALID_VALUE,
        "unregister pinned": INVALID_VALUE,
        "free the middle of pinned": INVALID_VALUE,
    },
    "register pages": {
        "unaligned": SUCCESS,
        "same page, apart": SUCCESS,
        "next page": SUCCESS,
        "unregister by page": NOT_REGISTERED,
        "unregister by its address": SUCCESS,
        "unregister the middle": INVALID_VALUE,
        "nothing there": INVALID_VALUE,
    },
    "register device memory": {"reserved": INVALID_VALUE, "mapped": INVALID_VALUE},
    "plain block": {"unmap": INVALID_VALUE, "retain handle": INVALID_VALUE},
    "two forbidden calls in a capture; end": [
        CAPTURE_UNSUPPORTED,
        CAPTURE_UNSUPPORTED,
        CAPTURE_INVALIDATED,
    ],
    "capture of a blocking stream: code, end": {
        "cuMemcpyDtoH": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
        "cuMemsetD8": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
        "is legacy capturing": [CAPTURE_IMPLICIT, SUCCESS],
        "synchronize legacy": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
    },
    "destroy a capturing stream; wait for the context": [SUCCESS, SUCCESS],
    "driver calls in a host function": {"cuMemGetInfo": NOT_PERMITTED, "cuMemUnmap": NOT_PERMITTED},
    "cuMemCreate of": {
        "0 bytes": INVALID_VALUE,
        "2 MiB + 4 KiB": INVALID_VALUE,
        "unknown device": INVALID_DEVICE,
        "1 PiB": OUT_OF_MEMORY,
    },
}
NOT_HELD = {
    # Handles that are gone: anything may happen, and the simulator says so in sim.h.
    "release twice",
    "release twice while mapped; unmap",
    "release of a number that is no handle",
    "destroyed handles",
    # Never asked of a GPU.
    "what is left after unmapping over a hole",
    "map at odd places",
    "host memory of no size",
    "small block on a full device",
    "images of garbage",
    "launch in other geometries",
    # An illegal access to the simulator; a driver with heterogeneous memory management allows it.
    "launch on host memory that is not pinned",
    # Its own test: it needs the GPU to itself.
    "small cuMemAlloc blocks",
}


@functools.cache
def answers_of(path):
    with ThreadPoolExecutor(6) as pool:  # most of the time is a process finding its GPU
        found = {name: pool.submit(in_child, path, ALONE[name]) for name in ANSWERS}
    return {name: future.result() for name, future in found.items()}


@pytest.mark.parametrize("question", ANSWERS)
def test_answers(drv, question):
    assert answers_of(drv.path)[question] == ANSWERS[question]


def test_every_question_is_accounted_for():
    assert set(ANSWERS) | NOT_HELD == set(ALONE)
    assert not set(ANSWERS) & NOT_HELD


# The simulated driver alone: its control interface, and misuse that it survives


def test_sim_fails_on_demand(sim):
    before = sim.opened.sim_calls(b"cuMemCreate")
    assert sim.fail("cuMemCreate", nth=2, code=OUT_OF_MEMORY, times=2) == 0
    codes = [sim.try_create(PAGE) for _ in range(4)]
    assert codes == [SUCCESS, OUT_OF_MEMORY, OUT_OF_MEMORY, SUCCESS]
    assert sim.opened.sim_calls(b"cuMemCreate") - before == 4
    assert sim.fail("cuMemUnmap", code=999, times=0) == 0
    assert [sim.cuMemUnmap(0, 0) for _ in range(3)] == [999] * 3
    sim.opened.sim_clear_faults()
    assert sim.cuMemUnmap(0, 0) == INVALID_VALUE
    assert sim.fail("cuNoSuchCall") == -1
    assert sim.fail("cuMemUnmap", nth=0) == -1


def test_sim_other_processes_take_memory(sim):
    occupy = sim.opened.sim_occupy
    occupy.argtypes = [c_int, ctypes.c_uint64]
    free, total = sim.free_bytes(), sim.total_bytes()
    assert occupy(0, total - PAGE) == 0
    assert sim.free_bytes() == PAGE - (total - free)
    assert sim.try_create(PAGE * 2) == OUT_OF_MEMORY
    assert occupy(0, 0) == 0
    assert sim.free_bytes() == free
    assert occupy(99, 0) == -1


def test_sim_limits_pinned_memory(sim):
    limit = sim.opened.sim_host_limit
    limit.argtypes = [ctypes.c_uint64]
    held = sim.totals()["pinned_bytes"] + sim.totals()["registered_bytes"]
    limit(held + 8192)
    out, memory = c_void_p(), ctypes.create_string_buffer(3 * 4096)
    assert sim.cuMemHostAlloc(byref(out), 12288, 0) == OUT_OF_MEMORY
    pinned = sim.pinned(8192)
    address = ctypes.addressof(memory)
    assert sim.cuMemHostRegister(address, 4096, 0) == OUT_OF_MEMORY
    sim.check("cuMemFreeHost", pinned)
    limit(2**64 - 1)


def test_sim_notes_memory_taken_from_work_in_flight(sim):
    stream, pinned = sim.stream(), sim.pinned(PAGE)
    address, handle = sim.mapped(PAGE)
    sim.opened.sim_hold_streams(1)
    sim.check("cuMemcpyDtoHAsync", pinned, address, PAGE, stream)
    assert sim.violations() == []
    sim.discard(address, PAGE, handle)
    assert [text.split()[1] for text in sim.violations()] == ["cuMemUnmap"]
    sim.opened.sim_hold_streams(0)
    assert sim.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    assert sim.totals()["illegal_accesses"] == 1
    out = c_size_t()
    assert sim.cuMemGetInfo(byref(out), byref(out)) == ILLEGAL_ADDRESS
    assert sim.cuMemFreeHost(pinned) == ILLEGAL_ADDRESS
    sim.opened.sim_clear_violations()
    sim.check("cuMemFreeHost", pinned)
    sim.check("cuStreamDestroy", stream)


def test_sim_notes_memory_taken_from_a_launch_in_flight(sim):
    kernel, stream = Kernel(sim), sim.stream()
    other, other_handle = sim.mapped(PAGE)
    sim.opened.sim_hold_streams(1)
    assert kernel.launch(stream) == SUCCESS
    sim.discard(other, PAGE, other_handle)
    assert sim.violations() == []
    sim.check("cuMemUnmap", kernel.address, PAGE)
    assert [text.split()[1] for text in sim.violations()] == ["cuMemUnmap"]
    sim.opened.sim_hold_streams(0)
    assert sim.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    assert sim.totals()["illegal_accesses"] == 1
    sim.opened.sim_clear_violations()
    sim.map(kernel.address, PAGE, kernel.handle)
    sim.check("cuStreamDestroy", stream)
    kernel.close()


def test_sim_launches_on_pinned_memory_alone(sim):
    kernel, stream, pageable = Kernel(sim), sim.stream(), ctypes.create_string_buffer(4096)
    for pieces, digests in (
        (ctypes.addressof(pageable), kernel.pieces + 4096),
        (kernel.pieces, ctypes.addressof(pageable)),
        (kernel.pieces, kernel.pieces + 8192 - 32),  # beyond its end
        (kernel.address + PAGE, kernel.pieces),  # mapped nowhere
    ):
        assert sim.launch(kernel.kernel, pieces, digests, 2, stream) == SUCCESS
        assert sim.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
        sim.opened.sim_clear_violations()
    (ctypes.c_uint64 * 2).from_address(kernel.host)[:] = [kernel.address, PAGE]  # too large
    assert kernel.launch(stream) == SUCCESS
    assert sim.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    sim.opened.sim_clear_violations()
    sim.check("cuStreamDestroy", stream)
    kernel.close()


def test_sim_modules_and_kernels_that_are_gone(sim):
    before = sim.totals()["modules"]  # the library itself may have one
    kernel, stream = Kernel(sim), sim.stream()
    assert sim.totals()["modules"] == before + 1
    sim.check("cuModuleUnload", kernel.module)
    assert sim.totals()["modules"] == before
    assert kernel.launch(stream) == INVALID_HANDLE
    assert sim.cuModuleUnload(kernel.module) == INVALID_HANDLE
    out = c_void_p()
    assert sim.cuModuleGetFunction(byref(out), kernel.module, b"x") == INVALID_HANDLE
    for image in (b"\x7fELF", b"// PTX", b"\n.version 8.0\n"):
        sim.check("cuModuleUnload", sim.module(image))
    kernel.module = sim.module()
    sim.check("cuStreamDestroy", stream)
    kernel.close()


def test_sim_notes_memory_taken_from_work_that_came_during_the_wait(sim):
    stream, other, pinned = sim.stream(), sim.stream(), sim.pinned(PAGE)
    address, handle = sim.mapped(PAGE)
    first, second = sim.gate(stream), sim.gate(other)
    sim.check("cuMemcpyDtoHAsync", pinned, address, PAGE, stream)
    thread = threading.Thread(target=in_thread, args=(sim, lambda: sim.cuMemFreeHost(pinned)))
    before = sim.opened.sim_calls(b"cuMemFreeHost")
    thread.start()
    while sim.opened.sim_calls(b"cuMemFreeHost") == before:
        time.sleep(0.001)
    third = sim.gate(other)  # keeps what follows until the memory is gone
    sim.check("cuMemcpyDtoHAsync", pinned, address, PAGE, other)
    first.open()
    second.open()
    thread.join()
    assert [text.split()[1] for text in sim.violations()] == ["cuMemFreeHost"]
    third.open()
    sim.cuStreamSynchronize(other)
    sim.opened.sim_clear_violations()
    sim.check("cuStreamDestroy", stream)
    sim.check("cuStreamDestroy", other)
    sim.discard(address, PAGE, handle)


def test_sim_graph_on_unmapped_memory(sim):
    stream, graph, executable = sim.stream(), c_void_p(), c_void_p()
    address, handle = sim.mapped(PAGE)
    sim.check("cuStreamBeginCapture", stream, RELAXED)
    sim.check("cuMemsetD8Async", address, 6, PAGE, stream)
    sim.check("cuStreamEndCapture", stream, byref(graph))
    sim.check("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
    sim.discard(address, PAGE, handle)
    sim.check("cuGraphLaunch", executable, stream)
    assert sim.cuStreamSynchronize(stream) == 700
    sim.opened.sim_clear_violations()
    sim.check("cuGraphExecDestroy", executable)
    sim.check("cuGraphDestroy", graph)
    sim.check("cuStreamDestroy", stream)


def test_sim_misuse_of_handles_is_an_error(sim):
    handle = sim.create(PAGE)
    sim.check("cuMemRelease", handle)
    assert sim.cuMemRelease(handle) == INVALID_VALUE
    assert sim.cuMemRelease(0) == INVALID_VALUE
    address = sim.reserve(PAGE)
    assert sim.cuMemMap(address, PAGE, 0, handle, 0) == INVALID_VALUE
    sim.check("cuMemAddressFree", address, PAGE)
    for call in (sim.cuStreamDestroy, sim.cuStreamSynchronize, sim.cuEventDestroy):
        assert call(0xDEAD0) == 400


def test_sim_paused_memory_faults_on_touch(sim):
    def touch(drv):
        drv.start()
        address, _handle = drv.mapped(2 << 20)
        ctypes.memset(address, 1, 2 << 20)
        assert drv.read(address, 1) == b"\1"
        drv.check("cuMemUnmap", address, 2 << 20)
        print(ctypes.string_at(address, 1))

    assert in_child(sim.path, touch) == "signal 11"


def test_sim_many_handles_cost_no_descriptors(sim):
    before = len(os.listdir("/proc/self/fd"))
    handles = [sim.create(PAGE) for _ in range(10_000)]
    assert len(os.listdir("/proc/self/fd")) == before
    for handle in handles:
        sim.check("cuMemRelease", handle)


def test_sim_gives_released_memory_back_to_the_system(sim):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")

    size, before = 64 * MIB, resident()
    address, handle = sim.mapped(size)
    ctypes.memset(address, 1, size)
    assert resident() - before >= size
    sim.discard(address, size, handle)
    assert resident() - before < size // 8


def test_sim_devices_from_the_environment(sim):
    def devices(drv):
        drv.start(1)
        handle = drv.create(2 << 20)
        totals = drv.totals()
        return [totals["devices"], totals["physical_bytes"][:3], drv.total_bytes(), handle > 0]

    environment = {"MEMSAVER_SIM_DEVICES": "3", "MEMSAVER_SIM_MEMORY": "512MiB"}
    found = in_child(sim.path, devices, environment=environment)
    assert found == [3, [0, PAGE, 0], 512 * MIB, True]


def test_sim_access_is_per_device(sim):
    def peers(drv):
        drv.start(0)
        address, _handle = drv.mapped(2 << 20)
        stream = drv.stream()
        drv.start(1)
        theirs = drv.stream()
        codes = [drv.cuMemsetD8Async(address, 1, 64, theirs)]
        drv.set_access(address, 2 << 20, READ, device=1)
        codes += [drv.get_access(address, 0), drv.get_access(address, 1)]
        codes += [drv.cuMemsetD8Async(address, 1, 64, theirs)]
        drv.set_access(address, 2 << 20, READ_WRITE, device=1)
        codes += [drv.cuMemsetD8Async(address, 1, 64, theirs)]
        codes += [drv.cuMemsetD8Async(address, 1, 64, stream)]
        return codes

    found = in_child(sim.path, peers, environment={"MEMSAVER_SIM_DEVICES": "2"})
    assert found == [INVALID_VALUE, READ_WRITE, 1, INVALID_VALUE, SUCCESS, SUCCESS]


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("MEMSAVER_SIM_DEVICES", "0", 100),
        ("MEMSAVER_SIM_DEVICES", "-1", INVALID_VALUE),
        ("MEMSAVER_SIM_DEVICES", "99999999999999999999", INVALID_VALUE),
        ("MEMSAVER_SIM_DEVICES", "two", INVALID_VALUE),
        ("MEMSAVER_SIM_MEMORY", "80GB", INVALID_VALUE),
        ("MEMSAVER_SIM_MEMORY", "1", INVALID_VALUE),
        ("MEMSAVER_SIM_MEMORY", "4 GiB", INVALID_VALUE),
        ("MEMSAVER_SIM_FAULTS", "cuMemCreate", INVALID_VALUE),
        ("MEMSAVER_SIM_FAULTS", "cuNoSuchCall:1:2:1", INVALID_VALUE),
        ("MEMSAVER_SIM_FAULTS", "cuMemCreate:0:2:1", INVALID_VALUE),
        ("MEMSAVER_SIM_FAULTS", "cuMemCreate:1:2:1,", INVALID_VALUE),
        ("MEMSAVER_SIM_FAULTS", "cuInit:1:100:1", 100),
        ("MEMSAVER_SIM_FAULTS", "cuMemCreate:3:2,cuMemMap:1:2:0", SUCCESS),
    ],
)
def test_sim_environment_is_checked(sim, variable, value, code):
    def initialise(drv):
        return drv.cuInit(0)

    assert in_child(sim.path, initialise, environment={variable: value}) == code


def test_sim_context_can_end_and_begin_again(sim):
    def twice(drv):
        drv.start()
        drv.pinned(4096)
        stream = drv.stream()
        drv.get("cuMemAlloc", ctypes.c_uint64, 512)
        drv.check("cuDevicePrimaryCtxRelease", 0)
        out = ctypes.create_string_buffer(64)
        codes = [drv.cuMemGetInfo(out, out), drv.cuDevicePrimaryCtxRelease(0)]
        totals = drv.totals()
        kept = [totals[name] for name in ("streams", "allocations", "pinned_bytes")]
        drv.start()
        return [codes, kept, drv.cuStreamSynchronize(stream), drv.free_bytes() == drv.total_bytes()]

    context_is_destroyed = 709
    assert in_child(sim.path, twice) == [[context_is_destroyed, 201], [0, 0, 0], 400, True]


def test_sim_after_the_drivers_own_end(sim):
    sim.opened.sim_deinitialize(1)
    try:
        assert sim.cuMemUnmap(0, 0) == 4
        assert sim.cuCtxSynchronize() == 4
    finally:
        sim.opened.sim_deinitialize(0)


def test_sim_delays(sim):
    delay = sim.opened.sim_stream_delay
    delay.argtypes = [ctypes.c_uint64]
    address, handle = sim.mapped(PAGE)
    stream = sim.stream()
    delay(50_000)
    started = time.monotonic()
    sim.check("cuMemsetD8Async", address, 1, PAGE, stream)
    assert time.monotonic() - started < 0.05
    sim.check("cuStreamSynchronize", stream)
    assert time.monotonic() - started >= 0.05
    delay(0)
    sim.check("cuStreamDestroy", stream)
    sim.discard(address, PAGE, handle)


def test_sim_streams_in_many_threads(sim):
    errors = []

    def work():
        try:
            sim.check("cuCtxSetCurrent", sim.context)
            stream = sim.stream()
            for value in range(1, 30):
                address, handle = sim.mapped(PAGE)
                sim.check("cuMemsetD8Async", address, value, PAGE, stream)
                sim.check("cuStreamSynchronize", stream)
                assert ctypes.string_at(address + PAGE - 1, 1) == bytes([value])
                sim.discard(address, PAGE, handle)
            sim.check("cuStreamDestroy", stream)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sim.violations() == []
