"""Questions about plain blocks (cuMemAlloc) and pointer attributes.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref


def small_block_on_a_full_device(drv):
    drv.start()
    page, handles = 2 << 20, []
    blocks = [drv.get("cuMemAlloc", ctypes.c_uint64, 512)]
    size = drv.free_bytes() // page * page
    while size >= page:
        out = ctypes.c_uint64()
        if drv.cuMemCreate(byref(out), size, byref(drv.properties()), 0) == 0:
            handles.append(out.value)
        else:
            size = size // 2 // page * page
    out = ctypes.c_uint64()
    return {"512 B": drv.cuMemAlloc(byref(out), 512), "free of it": drv.cuMemFree(blocks[0])}


def free_of_null(drv):
    drv.start()
    return {"cuMemFree": drv.cuMemFree(0), "cuMemFreeHost": drv.cuMemFreeHost(0)}


def pointers_into_mapped_memory(drv):
    drv.start()
    page = 2 << 20
    address = drv.reserve(4 * page)
    for i in (0, 1):
        drv.map(address + i * page, page, drv.create(page))
    drv.map(address + 2 * page, page, drv.create(page), access=False)
    found = {}
    names = {"context": 1, "type": 2, "ordinal": 9, "range start": 11, "range size": 12}
    names["mapped"] = 13
    places = {"accessible": page + 64, "no access": 2 * page, "reserved": 3 * page}
    for place, offset in places.items():
        for name, attribute in names.items():
            out = ctypes.c_uint64()
            code = drv.cuPointerGetAttribute(byref(out), attribute, address + offset)
            value = out.value
            if code == 0 and name == "context":
                value = "null" if value == 0 else "primary" if value == drv.context.value else "?"
            if code == 0 and name == "range start":
                value = f"reservation +{value - address}"
            found[f"{place} {name}"] = value if code == 0 else f"code {code}"
    return found


def unmap_a_plain_block(drv):
    drv.start()
    block = drv.get("cuMemAlloc", ctypes.c_uint64, 2 << 20)
    out = ctypes.c_uint64()
    retained = drv.cuMemRetainAllocationHandle(byref(out), block)
    return {"unmap": drv.cuMemUnmap(block, 2 << 20), "retain handle": retained}


def many_small_blocks(drv):
    drv.start()
    before = drv.free_bytes()
    blocks = [drv.get("cuMemAlloc", ctypes.c_uint64, 512) for _ in range(100)]
    taken = before - drv.free_bytes()
    for block in blocks:
        drv.check("cuMemFree", block)
    return {"taken by 100 of 512 B": taken, "kept after": before - drv.free_bytes()}


QUESTIONS = {
    "free of null": free_of_null,
    "pointer attributes": pointers_into_mapped_memory,
    "plain block": unmap_a_plain_block,
    "small cuMemAlloc blocks": many_small_blocks,
    "small block on a full device": small_block_on_a_full_device,
}
