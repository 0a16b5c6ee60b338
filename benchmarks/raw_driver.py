"""The driver's bare calls: the limit of what any library can do without a backup."""

from __future__ import annotations

import ctypes
from typing import Any

from workloads import GIB, MIB

LIMIT = "driver"


def count_gpus() -> int:
    """The GPUs that the driver offers; 0 without one. Starts no context."""
    count = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class RawDriver:
    """The driver calls that any library must make, and no more: handles of 1 GiB, a reservation."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        location = Location(1, 0)  # a device, the first
        self._prop = AllocationProp(type=1, location=location)  # pinned
        self._access = AccessDesc(location, 3)  # read and write
        self._ranges: dict[str, tuple[int, list[int]]] = {}
        self._handles: dict[str, list[ctypes.c_uint64]] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def setup(self, tag: str, total: int) -> int:
        """Maps so many bytes, rounded up to the granularity; how many."""
        total = -(-total // (2 * MIB)) * 2 * MIB
        sizes = [min(GIB, total - at) for at in range(0, total, GIB)]
        address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(total),
            ctypes.c_size_t(GIB),
            zero,
            zero,
        )
        self._ranges[tag] = address.value, sizes
        self.resume(tag)
        self.use(tag)
        return total

    def use(self, tag: str) -> None:
        """Writes to all of the memory."""
        address, sizes = self._ranges[tag]
        self._call(
            "cuMemsetD8_v2",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(1),
            ctypes.c_size_t(sum(sizes)),
        )

    def pause(self, tag: str) -> None:
        """Unmaps and releases."""
        address, sizes = self._ranges[tag]
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(sum(sizes)))
        for handle in self._handles.pop(tag):
            self._call("cuMemRelease", handle)

    def resume(self, tag: str) -> None:
        """Creates and maps."""
        address, sizes = self._ranges[tag]
        handles = self._handles[tag] = []
        at = address
        for size in sizes:
            handle, length = ctypes.c_uint64(), ctypes.c_size_t(size)
            self._call(
                "cuMemCreate",
                ctypes.byref(handle),
                length,
                ctypes.byref(self._prop),
                ctypes.c_uint64(0),
            )
            self._call(
                "cuMemMap",
                ctypes.c_uint64(at),
                length,
                ctypes.c_size_t(0),
                handle,
                ctypes.c_uint64(0),
            )
            handles.append(handle)
            at += size
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            ctypes.c_size_t(sum(sizes)),
            ctypes.byref(self._access),
            ctypes.c_size_t(1),
        )
