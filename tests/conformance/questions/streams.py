"""Questions about streams, events, and driver calls in a stream's host function.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref


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


QUESTIONS = {
    "driver calls in a host function": driver_calls_in_a_host_function,
    "destroyed handles": unknown_handles,
}
