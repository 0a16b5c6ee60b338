"""Questions about captures.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_void_p

from driver_values import GLOBAL, LEGACY, RELAXED


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


QUESTIONS = {
    "two forbidden calls in a capture; end": after_invalidation,
    "capture of a blocking stream: code, end": capture_of_a_blocking_stream,
    "destroy a capturing stream; wait for the context": stream_destroyed_while_capturing,
}
