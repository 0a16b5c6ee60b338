"""Questions about pinned and registered host memory.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p


def host_memory_of_no_size(drv):
    drv.start()
    out = c_void_p(1)
    code = drv.cuMemHostAlloc(byref(out), 0, 0)
    pointer = "untouched" if out.value == 1 else "null" if not out.value else "an address"
    return {"code": code, "pointer": pointer}


def register_what_is_pinned(drv):
    drv.start()
    pinned = drv.pinned(2 << 20)
    codes = {"register pinned": drv.cuMemHostRegister(pinned, 4096, 0)}
    codes["unregister pinned"] = drv.cuMemHostUnregister(pinned)
    codes["free the middle of pinned"] = drv.cuMemFreeHost(pinned + 4096)
    return codes


def register_pages(drv):
    drv.start()
    import mmap

    memory = mmap.mmap(-1, 8 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    codes = {"unaligned": drv.cuMemHostRegister(address + 100, 1000, 0)}
    codes["same page, apart"] = drv.cuMemHostRegister(address + 2000, 1000, 0)
    codes["next page"] = drv.cuMemHostRegister(address + 4096, 4096, 0)
    codes["unregister by page"] = drv.cuMemHostUnregister(address)
    codes["unregister by its address"] = drv.cuMemHostUnregister(address + 100)
    codes["unregister the middle"] = drv.cuMemHostUnregister(address + 4096 + 64)
    codes["nothing there"] = drv.cuMemHostRegister(1 << 20, 4096, 0)
    return codes


def register_device_memory(drv):
    drv.start()
    address = drv.reserve(2 << 20)
    reserved = drv.cuMemHostRegister(address, 4096, 0)
    drv.map(address, 2 << 20, drv.create(2 << 20))
    return {"reserved": reserved, "mapped": drv.cuMemHostRegister(address, 4096, 0)}


def copy_across_registrations(drv):
    drv.start()
    import mmap

    page = 4096
    memory = mmap.mmap(-1, 8 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for first, pages in ((1, 2), (3, 2)):  # pages 0 and 5 to 7 are not registered
        drv.check("cuMemHostRegister", address + first * page, pages * page, 0)
    drv.check("cuMemHostRegister", address + 6 * page + 1024, 1024, 0)
    device, _ = drv.mapped(2 << 20)
    stream = drv.stream()
    parts = {
        "of one": (1, 2),
        "of two": (2, 2),
        "of one and what follows": (4, 2),
        "of one and what precedes": (0, 2),
        "of two and what is around": (0, 6),
        "of a part of a page and the rest": (6, 1),
        "of the rest of that page": (6, 0.25),
    }
    codes = {}
    for name, (first, pages) in parts.items():
        host, size = address + first * page, int(pages * page)
        codes[name] = [
            drv.cuMemcpyHtoD(device, host, size),
            drv.cuMemcpyDtoH(host, device, size),
            drv.cuMemcpyHtoDAsync(device, host, size, stream),
            drv.cuMemcpyDtoHAsync(host, device, size, stream),
        ]
    drv.check("cuStreamSynchronize", stream)
    return codes


QUESTIONS = {
    "copy across registrations": copy_across_registrations,
    "register pinned memory": register_what_is_pinned,
    "register pages": register_pages,
    "register device memory": register_device_memory,
    "host memory of no size": host_memory_of_no_size,
}
