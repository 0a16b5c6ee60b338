"""Questions about calls without a context and about destroyed contexts.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref


def without_current_context(drv):
    drv.check("cuInit", 0)
    page, out = 2 << 20, ctypes.c_uint64()

    def codes():
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        found = {"reserve": drv.cuMemAddressReserve(byref(address), page, 0, 0, 0)}
        properties = drv.properties(0)
        found["create"] = drv.cuMemCreate(byref(handle), page, byref(properties), 0)
        if handle.value and address.value:
            found["map"] = drv.cuMemMap(address.value, page, 0, handle.value, 0)
            found["access"] = drv.set_access(address.value, page)
            found["pointer"] = drv.cuPointerGetAttribute(byref(out), 2, address.value)
            found["unmap"] = drv.cuMemUnmap(address.value, page)
            found["release"] = drv.cuMemRelease(handle.value)
            found["free"] = drv.cuMemAddressFree(address.value, page)
        return found

    before = codes()
    drv.start()
    drv.cuCtxSetCurrent(None)
    return {"no context at all": before, "retained, none current": codes()}


def context_released_under_mappings(drv):
    drv.start()
    address, _handle = drv.mapped(2 << 20)
    drv.write(address, b"kept")
    drv.check("cuDevicePrimaryCtxRelease", 0)
    drv.start()
    buffer = ctypes.create_string_buffer(4)
    read = drv.cuMemcpyDtoH(ctypes.addressof(buffer), address, 4)
    kept = buffer.raw.decode(errors="replace")
    return {"read": read, "found": kept, "unmap": drv.cuMemUnmap(address, 2 << 20)}


QUESTIONS = {
    "mapping calls without a context": without_current_context,
    "primary context released under a mapping": context_released_under_mappings,
}
