"""Tests pinned and registered host memory on both drivers."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p

from driver_values import ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, PAGE, SUCCESS


def test_registrations_must_not_overlap(drv):
    memory = ctypes.create_string_buffer(6 * PAGE)
    address = (ctypes.addressof(memory) + PAGE - 1) // PAGE * PAGE
    assert drv.cuMemHostUnregister(address) == NOT_REGISTERED
    drv.check("cuMemHostRegister", address, 2 * PAGE, 0)
    assert drv.cuMemHostRegister(address, 2 * PAGE, 0) == ALREADY_REGISTERED
    assert drv.cuMemHostRegister(address + PAGE, 2 * PAGE, 0) == ALREADY_REGISTERED
    drv.check("cuMemHostRegister", address + 2 * PAGE, PAGE, 0)  # the adjacent range
    assert drv.cuMemHostUnregister(address + PAGE) != SUCCESS  # not the start of the range
    drv.check("cuMemHostUnregister", address + 2 * PAGE)
    drv.check("cuMemHostUnregister", address)
    assert drv.cuMemHostUnregister(address) == NOT_REGISTERED


def test_host_memory_is_freed_once(drv):
    address = drv.pinned(4096)
    drv.check("cuMemFreeHost", address)
    assert drv.cuMemFreeHost(address) == INVALID_VALUE


def test_host_memory_of_no_size(drv):
    out = c_void_p()
    assert drv.cuMemHostAlloc(byref(out), 0, 0) == SUCCESS
    assert drv.cuMemFreeHost(out.value or 0) == SUCCESS


def test_host_memory_that_is_not_pinned_has_no_device_address(drv):
    out, memory = ctypes.c_uint64(), ctypes.create_string_buffer(4096)
    address = ctypes.addressof(memory)
    assert drv.cuMemHostGetDevicePointer(byref(out), address, 0) == INVALID_VALUE
