"""Tests the order of work in streams and events on both drivers."""

from __future__ import annotations

import time
from ctypes import byref, c_float

from driver_api import in_thread
from driver_values import LEGACY, NON_BLOCKING, NOT_READY, PAGE, PER_THREAD, SUCCESS


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


def test_elapsed_time_needs_completed_events(drv, streams):
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
