"""Pinned and registered host memory.

Each is asked in a process of its own, and runs from its source alone with driver_api imported.
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


QUESTIONS = {
    "register pinned memory": register_what_is_pinned,
    "register pages": register_pages,
    "register device memory": register_device_memory,
    "host memory of no size": host_memory_of_no_size,
}
