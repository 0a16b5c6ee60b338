"""Tests captures and graphs on both drivers."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p

import pytest
from driver_api import Driver, in_thread
from driver_values import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GLOBAL,
    LEGACY,
    PAGE,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    WRONG_THREAD,
)
from fingerprint_kernel import Kernel
from prepared_calls import NOT_ASSERTED, WAITS, ready_call
from questions.calls import CALLS


class Bench:
    """A capture on a non-blocking stream, and previously created objects for the forbidden
    calls.
    """

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
        """Return the result codes of the call and of ending the capture."""
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
    """Make all driver calls of a pause and a resume on addresses and handles."""
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
    return bench.drv.capture_status(LEGACY)  # 0: not capturing


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
    """Make the driver calls that compute fingerprints on a thread in relaxed mode."""
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
