"""The CUDA driver's own calls, made without the library: what devices are, what bare calls cost.

For the command line and the benchmarks; nothing that memsaver does goes through here. It is the
driver that the library opened, the simulated one included, found by `memsaver.native`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver.errors import DriverError, MemsaverError, OutOfDeviceMemoryError
from memsaver.native import _C, LIBRARY_DIR

__all__ = ["BareDriver", "BareMemory", "PinnedMemory"]

GRANULARITY = 2 << 20  # of mapped memory, on every device there is
PIECE = 1 << 30  # bytes of one handle

_OUT_OF_MEMORY = 2
_NON_BLOCKING = 1


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class BareDriver:
    """The opened driver. Any thread; starts no context but where `context` says so.

    Attributes:
        version: the CUDA version that it supports: 13000 for 13.0.
        name: what was opened: "libcuda.so.1", or what MEMSAVER_DRIVER names.
        simulated: whether it is the simulated driver.

    Raises:
        NotLoadedError: there is no driver, or none that can be used; the message says what to do.
    """

    def __init__(self) -> None:
        self.version, self.name, self.simulated = _C.driver_info()
        path = str(LIBRARY_DIR / "libmemsaver_sim.so") if self.simulated else self.name
        self._library = ctypes.CDLL(path)

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call by its symbol's name.

        Raises:
            OutOfDeviceMemoryError: it returned CUDA_ERROR_OUT_OF_MEMORY.
            DriverError: it returned anything else than success, or the driver has no such call.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"{self.name} has no {name}; update the driver", call=name) from None
        code = function(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        says = text.value.decode() if text.value else "an unknown error"
        kind = OutOfDeviceMemoryError if code == _OUT_OF_MEMORY else DriverError
        raise kind(f"{name} failed with {says} ({code})", call=name, cuda_error=code)

    def device_count(self) -> int:
        """The devices that this process may use."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def attribute(self, device: int, number: int) -> int:
        """A CUdevice_attribute of a device, by its number. Needs no context."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def device_name(self, device: int) -> str:
        """The device's name, such as "NVIDIA H200"."""
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def total_bytes(self, device: int) -> int:
        """The device's memory. Needs no context."""
        total = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        return total.value

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context, current on this thread; started if nobody has.

        It takes up to half a GiB of device memory, and a second where nobody started it before.
        """
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def stream(self) -> Iterator[ctypes.c_void_p]:
        """A non-blocking stream of the current context."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            yield stream
        finally:
            self.call("cuStreamSynchronize", stream)
            self.call("cuStreamDestroy_v2", stream)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Set device memory to a byte, and wait for it. In the device's context."""
        self.call(
            "cuMemsetD8_v2",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(nbytes),
        )
        self.call("cuStreamSynchronize", ctypes.c_void_p())

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at a device address. In the device's context."""
        data = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return data.raw


class BareMemory:
    """Addresses of a device, and memory behind them in handles of 1 GiB: the calls that any library
    must make, and no more. Nothing is mapped at first; one thread at a time.

    `pause` and `resume` are what a pause and a resume without a backup cost at least; the four
    calls behind them can be made one by one.

    Args:
        driver: the driver.
        total: bytes, rounded up to 2 MiB.
        device: the device's index.
    """

    def __init__(self, driver: BareDriver, total: int, device: int = 0) -> None:
        self._call = driver.call
        self.bytes = -(-total // GRANULARITY) * GRANULARITY
        self._sizes = [min(PIECE, self.bytes - at) for at in range(0, self.bytes, PIECE)]
        location = _Location(1, device)  # of a device
        self._prop = _AllocationProp(type=1, location=location)  # pinned
        self._access = _AccessDesc(location, 3)  # read and write
        self._handles: list[ctypes.c_uint64] = []
        self._mapped = False
        address, none = ctypes.c_uint64(), ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self.bytes),
            ctypes.c_size_t(PIECE),
            none,
            none,
        )
        self.address = address.value

    def create(self) -> None:
        """Take the memory from the driver. On an error none is held."""
        try:
            for size in self._sizes:
                handle = ctypes.c_uint64()
                self._call(
                    "cuMemCreate",
                    ctypes.byref(handle),
                    ctypes.c_size_t(size),
                    ctypes.byref(self._prop),
                    ctypes.c_uint64(0),
                )
                self._handles.append(handle)
        except MemsaverError:
            self.release()
            raise

    def map(self) -> None:
        """Map it, and make it accessible. After an error part of it may be mapped: unmap it."""
        self._mapped = True  # or in part: unmapping goes over holes
        at = self.address
        for handle, size in zip(self._handles, self._sizes, strict=True):
            self._call(
                "cuMemMap",
                ctypes.c_uint64(at),
                ctypes.c_size_t(size),
                ctypes.c_size_t(0),
                handle,
                ctypes.c_uint64(0),
            )
            at += size
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.bytes),
            ctypes.byref(self._access),
            ctypes.c_size_t(1),
        )

    def unmap(self) -> None:
        """Unmap it. No work that uses it may be in flight: the driver does not look."""
        self._call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))
        self._mapped = False

    def release(self) -> None:
        """Give the memory back to the driver."""
        while self._handles:
            self._call("cuMemRelease", self._handles.pop(0))

    def pause(self) -> None:
        """Unmap and release."""
        self.unmap()
        self.release()

    def resume(self) -> None:
        """Create and map."""
        self.create()
        self.map()

    def close(self) -> None:
        """Give back whatever is held, the addresses too."""
        if self._mapped:
            self.unmap()
        self.release()
        self._call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))


class PinnedMemory:
    """Pinned host memory. Made and closed in a device's context; one thread at a time.

    Raises:
        OutOfDeviceMemoryError: it is not to be had (the driver has one code for both).
    """

    def __init__(self, driver: BareDriver, nbytes: int) -> None:
        self._call = driver.call
        self.bytes = nbytes
        pointer = ctypes.c_void_p()
        self._call(
            "cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes), ctypes.c_uint(0)
        )
        self.address = pointer.value or 0

    def to_host(self, device_address: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        """Queue a copy of so many bytes, no more than there are, into this memory."""
        self._call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(self.address),
            ctypes.c_uint64(device_address),
            ctypes.c_size_t(nbytes),
            stream,
        )

    def to_device(self, device_address: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        """Queue a copy of so many bytes, no more than there are, out of this memory."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(device_address),
            ctypes.c_void_p(self.address),
            ctypes.c_size_t(nbytes),
            stream,
        )

    def close(self) -> None:
        """Give it back; waits for work of the device."""
        self._call("cuMemFreeHost", ctypes.c_void_p(self.address))
