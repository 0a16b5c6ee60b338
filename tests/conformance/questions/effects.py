"""The effects of a call on pending work and captures: whether the call waits or breaks a
capture.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_void_p

from driver_values import GLOBAL, PAGE, SUCCESS, HostFunction

from questions.calls import finish

BUSY_SECONDS = 0.3


def name_of(drv, code):
    return f"{drv.text('cuGetErrorName', code) or '?'} ({code})"


def make_busy(drv, stream, address):
    """Queue a host function that takes BUSY_SECONDS without running Python, followed by a
    memset.
    """
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
