"""Tests plain blocks (cuMemAlloc) and pointer attributes on both drivers."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_void_p

from driver_api import in_child
from driver_values import GIB, INVALID_VALUE, MIB, OUT_OF_MEMORY, PAGE, SUCCESS
from questions.blocks import many_small_blocks


def test_plain_allocation(drv):
    out = ctypes.c_uint64()
    assert drv.cuMemAlloc(byref(out), 0) == INVALID_VALUE
    free = drv.free_bytes()
    address = drv.get("cuMemAlloc", ctypes.c_uint64, 64 * MIB)
    assert drv.free_bytes() == free - 64 * MIB
    drv.write(address + 5, b"plain")
    assert drv.read(address + 5, 5) == b"plain"
    assert drv.cuMemUnmap(address, 64 * MIB) != SUCCESS
    drv.check("cuMemFree", address)
    assert drv.free_bytes() == free
    assert drv.cuMemFree(address) == INVALID_VALUE


def test_plain_allocation_of_more_than_the_free_memory(drv):
    out = ctypes.c_uint64()
    assert drv.cuMemAlloc(byref(out), drv.total_bytes() + GIB) == OUT_OF_MEMORY


def test_small_blocks_share_memory(drv):
    found = in_child(drv.path, many_small_blocks)
    assert found == {"taken by 100 of 512 B": PAGE, "kept after": 0}


def test_pointers_have_their_attributes(drv, mapped):
    memory_type, ordinal = 2, 9
    for address in (mapped[0], mapped[0] + PAGE - 1):
        assert drv.get("cuPointerGetAttribute", ctypes.c_uint, memory_type, address) == 2
        assert drv.get("cuPointerGetAttribute", c_int, ordinal, address) == drv.device
    pinned = drv.pinned(4096)
    assert drv.get("cuPointerGetAttribute", ctypes.c_uint, memory_type, pinned) == 1
    assert drv.get("cuPointerGetAttribute", c_void_p, 1, pinned) == drv.context.value
    drv.check("cuMemFreeHost", pinned)
    out, buffer = c_int(), ctypes.create_string_buffer(8)
    unknown = ctypes.addressof(buffer)
    assert drv.cuPointerGetAttribute(byref(out), memory_type, unknown) == INVALID_VALUE
