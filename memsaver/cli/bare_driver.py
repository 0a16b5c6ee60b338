"""Direct calls to the CUDA driver, for reading device properties and measuring the cost of bare
calls.

The benchmarks also use this module. The module calls the driver that the native library opened,
which may be the simulated driver.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver._runtime.native import _C, LIBRARY_DIR
from memsaver.errors import DriverError, MemsaverError, OutOfDeviceMemoryError

__all__ = ["BareDriver", "BareMemory", "PinnedMemory"]

GRANULARITY = 2 << 20  # bytes; the granularity of mapped memory on all current devices
PIECE = 1 << 30  # bytes of one physical handle

_OUT_OF_MEMORY = 2
_NON_BLOCKING = 1
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


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
    """The opened driver. Thread-safe. Only `context` creates a CUDA context.

    Attributes:
        version: the CUDA version that the driver supports, such as 13000 for CUDA 13.0.
        name: the name of the opened library, which is "libcuda.so.1" or the value of
            MEMSAVER_DRIVER.
        simulated: whether this is the simulated driver.

    Raises:
        NotLoadedError: there is no usable driver. The message contains advice.
    """

    def __init__(self) -> None:
        self.version, self.name, self.simulated = _C.driver_info()
        path = str(LIBRARY_DIR / "libmemsaver_sim.so") if self.simulated else self.name
        self._library = ctypes.CDLL(path)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function by its symbol's name.

        Raises:
            OutOfDeviceMemoryError: the call returned CUDA_ERROR_OUT_OF_MEMORY.
            DriverError: the call returned another error, or the driver has no such function.
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
        """Return the number of devices that this process may use."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def attribute(self, device: int, number: int) -> int:
        """Return the value of a device's CUdevice_attribute `number`. Needs no context."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def device_name(self, device: int) -> str:
        """Return the device's name, such as "NVIDIA H200"."""
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def total_bytes(self, device: int) -> int:
        """Return the size of the device's memory, in bytes. Needs no context."""
        total = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        return total.value

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the device's primary context current on this thread, and create it if necessary.

        Creating a context needs up to half a GiB of device memory and takes up to a second.
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
        """Create a non-blocking stream in the current context."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            yield stream
        finally:
            self.call("cuStreamSynchronize", stream)
            self.call("cuStreamDestroy_v2", stream)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Set each byte of device memory to a value, and wait for completion. Needs the device's
        context.
        """
        self.call(
            "cuMemsetD8_v2",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(nbytes),
        )
        self.call("cuStreamSynchronize", ctypes.c_void_p())

    def read(self, address: int, nbytes: int) -> bytes:
        """Return a copy of the bytes at a device address. Needs the device's context."""
        data = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return data.raw


class BareMemory:
    """A range of device addresses, and physical memory for it, in handles of `piece` bytes.

    The object makes only the driver calls that any library must make. Initially, nothing is mapped.
    `pause` and `resume` have the minimum cost of a pause and a resume without a backup. Their four
    steps can also be called separately. Only one thread at a time may use the object.

    Args:
        driver: the driver.
        total: the number of bytes, rounded up to 2 MiB.
        device: the device's index.
        piece: the size of each handle, a multiple of 2 MiB. The last handle can be smaller.
        exportable: whether the memory can be exported as file descriptors.
    """

    def __init__(
        self,
        driver: BareDriver,
        total: int,
        device: int = 0,
        *,
        piece: int = PIECE,
        exportable: bool = False,
    ) -> None:
        self._call = driver.call
        self.bytes = -(-total // GRANULARITY) * GRANULARITY
        self._sizes = [min(piece, self.bytes - at) for at in range(0, self.bytes, piece)]
        location = _Location(1, device)  # CU_MEM_LOCATION_TYPE_DEVICE
        self._prop = _AllocationProp(
            type=1,  # pinned
            requested_handle_types=_FILE_DESCRIPTOR if exportable else 0,
            location=location,
        )
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
        """Allocate physical memory. After an error, nothing is allocated."""
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

    def import_from(self, owner: BareMemory) -> None:
        """Import the owner's exportable memory, without mapping it.

        The owner must have the same size and pieces. Afterwards, both objects own the memory.
        Before the call, this object must own no memory. If the call fails, call `release`.
        """
        for source in owner._handles:
            file, handle = ctypes.c_int(), ctypes.c_uint64()
            self._call(
                "cuMemExportToShareableHandle",
                ctypes.byref(file),
                source,
                _FILE_DESCRIPTOR,
                ctypes.c_uint64(0),
            )
            try:
                self._call(
                    "cuMemImportFromShareableHandle",
                    ctypes.byref(handle),
                    ctypes.c_void_p(file.value),
                    _FILE_DESCRIPTOR,
                )
            finally:
                os.close(file.value)
            self._handles.append(handle)

    def map(self) -> None:
        """Map the memory, and make it accessible. If the call fails, call `unmap`."""
        self._mapped = True  # possibly only partly mapped: unmapping skips holes
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
        """Unmap the memory.

        The caller must ensure that no work in progress uses the memory. The driver does not check
        this.
        """
        self._call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))
        self._mapped = False

    def release(self) -> None:
        """Release the physical memory to the driver."""
        while self._handles:
            self._call("cuMemRelease", self._handles.pop(0))

    def pause(self) -> None:
        """Unmap and release the memory."""
        self.unmap()
        self.release()

    def resume(self) -> None:
        """Allocate and map the memory."""
        self.create()
        self.map()

    def close(self) -> None:
        """Release all remaining resources, including the addresses."""
        if self._mapped:
            self.unmap()
        self.release()
        self._call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))


class PinnedMemory:
    """Pinned host memory. The memory must be created and closed in a device's context, by one
    thread at a time.

    Raises:
        OutOfDeviceMemoryError: there is not enough memory. The driver uses the same error code for
            device and host memory.
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
        """Queue a copy of `nbytes` bytes (at most this memory's size) from the device."""
        self._call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(self.address),
            ctypes.c_uint64(device_address),
            ctypes.c_size_t(nbytes),
            stream,
        )

    def to_device(self, device_address: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        """Queue a copy of `nbytes` bytes (at most this memory's size) to the device."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(device_address),
            ctypes.c_void_p(self.address),
            ctypes.c_size_t(nbytes),
            stream,
        )

    def close(self) -> None:
        """Release the memory. The call waits until the device has finished its work."""
        self._call("cuMemFreeHost", ctypes.c_void_p(self.address))
