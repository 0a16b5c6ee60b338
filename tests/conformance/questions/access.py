"""Questions about access to mapped memory, and about uses of memory without access rights.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes

from driver_values import READ


def access_over_a_hole(drv):
    drv.start()
    page = 2 << 20
    address = drv.reserve(3 * page)
    for i in (0, 2):
        drv.map(address + i * page, page, drv.create(page), access=False)
    code = drv.set_access(address, 3 * page)
    return {"code": code, "rights": [drv.get_access(address + i * page) for i in (0, 2)]}


def access_of_half(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(2 * page), drv.create(2 * page)
    drv.map(address, 2 * page, handle, access=False)
    code = drv.set_access(address, page)
    return {"code": code, "rights": [drv.get_access(address + i * page) for i in (0, 1)]}


def access_read_only(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    return {"code": drv.set_access(address, 2 << 20, READ), "rights": drv.get_access(address)}


def access_none_again(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    return {"code": drv.set_access(address, 2 << 20, 0), "rights": drv.get_access(address)}


def access_of_unknown_device(drv):
    drv.start()
    address, _ = drv.mapped(2 << 20)
    return drv.set_access(address, 2 << 20, device=63)


def set_reserved(drv):
    drv.start()
    address, other = drv.reserve(2 << 20), drv.mapped(2 << 20)[0]
    code = drv.cuMemsetD8(address, 1, 64)
    later = drv.cuCtxSynchronize()
    return {"at once": code, "later": later, "the next set": drv.cuMemsetD8(other, 1, 64)}


def set_without_access(drv):
    drv.start()
    address, other = drv.reserve(2 << 20), drv.mapped(2 << 20)[0]
    drv.map(address, 2 << 20, drv.create(2 << 20), access=False)
    code = drv.cuMemsetD8(address, 1, 64)
    later = drv.cuCtxSynchronize()
    return {"at once": code, "later": later, "the next set": drv.cuMemsetD8(other, 1, 64)}


def copy_without_access(drv):
    drv.start()
    address, other = drv.reserve(4 << 20), drv.mapped(2 << 20)[0]
    drv.map(address, 2 << 20, drv.create(2 << 20), access=False)
    buffer = ctypes.create_string_buffer(64)
    mapped = drv.cuMemcpyDtoH(ctypes.addressof(buffer), address, 64)
    reserved = drv.cuMemcpyDtoH(ctypes.addressof(buffer), address + (2 << 20), 64)
    later = drv.cuCtxSynchronize()
    after = drv.cuMemsetD8(other, 1, 64)
    return {"mapped": mapped, "reserved": reserved, "later": later, "the next set": after}


QUESTIONS = {
    "access over a hole": access_over_a_hole,
    "access to half of a mapping": access_of_half,
    "access read-only": access_read_only,
    "access taken away": access_none_again,
    "access for an unknown device": access_of_unknown_device,
    "set memory that is reserved only": set_reserved,
    "set mapped memory without access": set_without_access,
    "copy mapped memory without access": copy_without_access,
}
