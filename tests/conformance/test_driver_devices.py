"""Tests device properties on both drivers."""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_int, c_size_t

from driver_values import INVALID_DEVICE, INVALID_VALUE, PAGE


def test_the_device_has_the_required_properties(drv):
    count = drv.get("cuDeviceGetCount", c_int)
    assert count >= 1
    out = c_int()
    assert drv.cuDeviceGet(byref(out), count) == INVALID_DEVICE
    assert drv.get("cuDeviceTotalMem", c_size_t, drv.device) >= drv.total_bytes()
    assert drv.get("cuDeviceGetAttribute", c_int, 102, drv.device) == 1  # virtual memory management
    assert drv.get("cuDeviceGetAttribute", c_int, 18, drv.device) == 0  # integrated


def test_the_granularity_is_one_page(drv):
    for option in (0, 1):
        properties = byref(drv.properties())
        assert drv.get("cuMemGetAllocationGranularity", c_size_t, properties, option) == PAGE


def test_pci_bus_id(drv):
    text = ctypes.create_string_buffer(32)
    drv.check("cuDeviceGetPCIBusId", text, 32, drv.device)
    found = re.fullmatch(
        r"([0-9a-fA-F]{4}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.0", text.value.decode()
    )
    assert found, text.value
    domain, bus, device = (
        drv.get("cuDeviceGetAttribute", c_int, name, drv.device) for name in (50, 33, 34)
    )
    assert [int(part, 16) for part in found.groups()] == [domain, bus, device]
    if drv.simulated:
        assert drv.cuDeviceGetPCIBusId(text, 4, drv.device) == INVALID_VALUE
    count = drv.get("cuDeviceGetCount", c_int)
    assert drv.cuDeviceGetPCIBusId(text, 32, count) == INVALID_DEVICE
