"""Tests which calls wait for a device's work, on both drivers."""

from __future__ import annotations

import time

import pytest
from driver_api import in_thread
from driver_values import NOT_READY, PAGE, SUCCESS
from prepared_calls import NOT_ASSERTED, WAITS, ready_call
from questions.calls import CALLS


@pytest.mark.parametrize("name", sorted(WAITS))
def test_calls_that_wait_for_all_work_of_the_device(drv, mapped, streams, name):
    stream = streams()
    call, clear_up = ready_call(drv, name)
    drv.host_function(stream, lambda: time.sleep(0.1))
    drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
    code = call()
    assert drv.cuStreamQuery(stream) == SUCCESS
    clear_up(code)
    assert code == SUCCESS


@pytest.mark.parametrize("name", sorted(set(CALLS) - WAITS - NOT_ASSERTED))
def test_calls_that_do_not_wait(drv, mapped, streams, name):
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


def test_mapping_calls_do_not_wait_for_streams(drv, mapped, streams):
    stream = streams()
    with drv.gate(stream) as gate:
        drv.check("cuMemsetD8Async", mapped[0], 1, PAGE, stream)
        gate.entered.wait(5)
        address, handle = in_thread(drv, lambda: drv.mapped(PAGE), timeout=3)
        assert drv.cuStreamQuery(stream) == NOT_READY
    drv.check("cuStreamSynchronize", stream)
    drv.discard(address, PAGE, handle)
