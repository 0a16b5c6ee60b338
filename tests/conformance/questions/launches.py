"""Questions about modules and about launches of the library's own kernel.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p


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


QUESTIONS = {
    "launch on host memory that is not pinned": launch_on_unpinned_memory,
    "launch in other geometries": launch_in_other_geometries,
    "images of garbage": garbage_images,
}
