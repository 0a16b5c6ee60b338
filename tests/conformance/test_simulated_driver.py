"""Tests the simulated driver's control interface, and the misuse that it detects."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

import pytest
from driver_api import in_child, in_thread
from driver_values import (
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    OUT_OF_MEMORY,
    PAGE,
    READ,
    READ_WRITE,
    RELAXED,
    SUCCESS,
)
from fingerprint_kernel import Kernel


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


def test_sim_removes_single_faults(sim):
    begin, end = sim.opened.sim_begin_fault, sim.opened.sim_end_fault
    begin.argtypes = [ctypes.c_char_p, ctypes.c_uint64, c_int, ctypes.c_uint64]
    begin.restype, end.argtypes = ctypes.c_int64, [ctypes.c_int64]
    outer, inner = (begin(b"cuMemUnmap", 1, code, 0) for code in (999, OUT_OF_MEMORY))
    assert begin(b"cuNoSuchCall", 1, 999, 0) == -1
    end(inner)
    end(inner)  # no longer exists
    assert sim.cuMemUnmap(0, 0) == 999
    end(outer)
    assert sim.cuMemUnmap(0, 0) == INVALID_VALUE


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


def test_sim_has_smaller_pages_on_demand(sim):
    def small(drv):
        set_granularity = drv.opened.sim_granularity
        set_granularity.argtypes = [ctypes.c_uint64]
        codes = [set_granularity(nbytes) for nbytes in (0, 2048, 12288, 4 << 20, 8192)]
        drv.start()
        codes += [set_granularity(2 << 20), drv.try_create(4096), drv.try_create(24576)]
        properties = byref(drv.properties())
        address = drv.reserve(16384)
        for i in range(2):
            drv.map(address + 8192 * i, 8192, drv.create(8192))
            drv.write(address + 8192 * i, bytes([i + 1]) * 8192)
        drv.check("cuMemUnmap", address, 8192)
        rest = drv.read(address + 8192, 8192) == bytes([2]) * 8192
        got = drv.get("cuMemGetAllocationGranularity", c_size_t, properties, 0)
        return [codes, got, rest]

    refused, late = [-1] * 4, -1
    codes = [*refused, 0, late, INVALID_VALUE, SUCCESS]
    assert in_child(sim.path, small) == [codes, 8192, True]


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
    unmapped = sim.reserve(PAGE)
    for what, pieces, digests in (
        ("pieces in pageable memory", ctypes.addressof(pageable), kernel.pieces + 4096),
        ("digests in pageable memory", kernel.pieces, ctypes.addressof(pageable)),
        ("digests beyond its end", kernel.pieces, kernel.pieces + 8192 - 32),
        ("pieces that are mapped nowhere", unmapped, kernel.pieces),
    ):
        assert sim.launch(kernel.kernel, pieces, digests, 2, stream) == SUCCESS
        assert sim.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS, what
        sim.opened.sim_clear_violations()
    (ctypes.c_uint64 * 2).from_address(kernel.host)[:] = [kernel.address, PAGE]  # too large a piece
    assert kernel.launch(stream) == SUCCESS
    assert sim.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    sim.opened.sim_clear_violations()
    sim.check("cuMemAddressFree", unmapped, PAGE)
    sim.check("cuStreamDestroy", stream)
    kernel.close()


def test_sim_unloaded_modules_and_kernels_are_errors(sim):
    before = sim.totals()["modules"]  # the library itself may have loaded one
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
    third = sim.gate(other)  # delays the copy until the memory is freed
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


def test_sim_reads_and_writes_like_the_host_without_faults(sim):
    read, write = sim.opened.sim_read, sim.opened.sim_write
    read.argtypes = write.argtypes = [ctypes.c_uint64, c_void_p, ctypes.c_uint64]
    address, handle = sim.reserve(2 * PAGE), sim.create(PAGE)  # so the next page is not mapped
    sim.map(address, PAGE, handle)
    found = ctypes.create_string_buffer(8)
    assert read(address, found, 8) == 0 and found.raw == bytes(8)
    ctypes.memmove(address + 4000, b"adjacent", 8)
    assert read(address + 4000, found, 8) == 0 and found.raw == b"adjacent"
    assert write(address + PAGE - 8, b"last one", 8) == 0
    assert ctypes.string_at(address + PAGE - 8, 8) == b"last one"
    assert read(address + PAGE - 7, found, 8) == -1 == write(address + PAGE - 7, found, 8)
    sim.set_access(address, PAGE, READ)
    assert read(address, found, 8) == 0 and write(address, found, 8) == -1
    sim.check("cuMemUnmap", address, PAGE)
    assert read(address, found, 8) == -1 == write(address, found, 8)
    sim.check("cuMemRelease", handle)
    sim.check("cuMemAddressFree", address, 2 * PAGE)
    host = ctypes.create_string_buffer(b"of the host", 12)
    assert write(ctypes.addressof(host), b"at", 2) == 0 and host.value == b"at the host"


def test_sim_many_handles_cost_no_descriptors(sim):
    before = len(os.listdir("/proc/self/fd"))
    handles = [sim.create(PAGE) for _ in range(10_000)]
    assert len(os.listdir("/proc/self/fd")) == before
    for handle in handles:
        sim.check("cuMemRelease", handle)


def test_sim_releases_memory_to_the_system(sim):
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
