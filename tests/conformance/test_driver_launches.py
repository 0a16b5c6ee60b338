"""Tests modules and launches of the library's own kernel on both drivers."""

from __future__ import annotations

from ctypes import byref, c_void_p

import pytest
from driver_api import DriverError, in_thread
from driver_values import INVALID_IMAGE, INVALID_PTX, NOT_FOUND, NOT_READY, PAGE, RELAXED, SUCCESS
from fingerprint_kernel import PIECES, Kernel


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


def test_a_missing_kernel_is_not_found(drv):
    module, out = drv.module(), c_void_p()
    assert drv.cuModuleGetFunction(byref(out), module, b"no_such_kernel") == NOT_FOUND
    drv.check("cuModuleUnload", module)


def test_a_garbage_image_is_rejected(drv):
    with pytest.raises(DriverError) as failed:
        drv.module(b"garbage")  # the driver interprets text as PTX
    assert failed.value.code in (INVALID_IMAGE, INVALID_PTX)


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
