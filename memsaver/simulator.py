"""The simulated CUDA driver (MEMSAVER_DRIVER=sim), which runs rollout code without a GPU and can
inject faults.

Simulated device memory is host memory at the simulated addresses, so CPU code can read and write it
directly. As on a GPU, an access to paused memory causes a fault. torch itself cannot allocate
simulated memory, so `empty` creates a CPU tensor in memory of the open region. Without a device
argument, `empty` and `buffer` use the region's device or, if the region names no device, the first
device. The simulator does not simulate torch's allocator, speed, or kernels other than memsaver's
own.
"""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memsaver._memory import pickling
from memsaver._memory.devices import Device, index_of
from memsaver._memory.regions import named_devices
from memsaver._runtime.blocks import block
from memsaver._runtime.native import _C, LIBRARY_DIR, emit_warnings
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError

if TYPE_CHECKING:
    import torch

__all__ = ["active", "buffer", "control", "empty", "fault"]


def active() -> bool:
    """Return whether this process uses the simulated driver. Opens the driver."""
    return _C.driver_info()[2]


def control() -> ctypes.CDLL:
    """Return the simulator's control functions, which csrc/sim/sim.h declares."""
    library = ctypes.CDLL(str(LIBRARY_DIR / "libmemsaver_sim.so"))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sim_fail": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64]),
    "sim_begin_fault": (
        ctypes.c_int64,
        [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64],
    ),
    "sim_end_fault": (None, [ctypes.c_int64]),
    "sim_clear_faults": (None, []),
    "sim_calls": (ctypes.c_uint64, [ctypes.c_char_p]),
    "sim_violation": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]),
    "sim_clear_violations": (None, []),
    "sim_occupy": (ctypes.c_int, [ctypes.c_int, ctypes.c_uint64]),
    "sim_peer_access": (None, [ctypes.c_int]),
    "sim_host_limit": (None, [ctypes.c_uint64]),
    "sim_stream_delay": (None, [ctypes.c_uint64]),
    "sim_copy_rate": (None, [ctypes.c_uint64]),
    "sim_hold_streams": (None, [ctypes.c_int]),
    "sim_deinitialize": (None, [ctypes.c_int]),
}


@block
def fault(call: str, code: int, *, nth: int = 1, times: int = 1) -> Iterator[None]:
    """Make the `nth` call to a driver function and the next `times - 1` calls fail with `code`.

    If `times` is 0, all calls fail until the block ends. A call that fails has no effect.

    Raises:
        ConfigError: the simulator has no such function, or an argument is invalid.
    """
    if not isinstance(call, str):
        raise ConfigError(f"a driver function is named by a string, not {call!r}")
    library = control()
    number = library.sim_begin_fault(
        call.encode(errors="replace"),
        _count(nth, "nth"),
        _count(code, "a driver's code", bits=31),
        _count(times, "times"),
    )
    if number < 0:
        raise ConfigError(f"the simulated driver has no call {call!r}, or nth is zero")
    try:
        yield
    finally:
        library.sim_end_fault(number)


class Buffer:
    """A writable buffer in device memory of the open region. The buffer is freed when the last
    reference is deleted.
    """

    def __init__(self, nbytes: int, device: Device = None) -> None:
        nbytes = _count(nbytes, "a size in bytes")
        if not active():
            raise InvalidStateError("simulated memory needs MEMSAVER_DRIVER=sim")
        self.address = _C.malloc(nbytes, _device(device))
        self.nbytes = nbytes
        self.array = (ctypes.c_char * nbytes).from_address(self.address)
        # A tensor may keep the array alive longer than this object; the memory exists as long as
        # the array. It is not freed at exit, because threads and exit handlers may still use it.
        weakref.finalize(self.array, _free, self.address).atexit = False


def _free(address: int) -> None:
    _C.free(address)
    emit_warnings()


def _count(number: Any, what: str, bits: int = 64) -> int:
    try:
        count = operator.index(number)
    except TypeError:
        raise ConfigError(f"{what} must be an integer, not {number!r}") from None
    if not 0 <= count < 1 << bits:
        raise ConfigError(f"{what} must be from 0 to 2^{bits} - 1, not {count}")
    return count


def _device(device: Device) -> int:
    index = None if device is None else index_of(device)
    if index is None:
        named = named_devices()
        index = named[0] if len(named) == 1 else 0
    return index


def buffer(nbytes: int, device: Device = None) -> Buffer:
    """Allocate uninitialized simulated device memory in the tag of the open region.

    Raises:
        ConfigError: the size or the device is invalid.
        InvalidStateError: no region is open for this device, or the driver is not simulated.
        OutOfDeviceMemoryError: the simulated device is full.
    """
    return Buffer(nbytes, device)


def empty(shape: Sequence[int] | int, dtype: Any = None, device: Device = None) -> torch.Tensor:
    """Create an uninitialized CPU torch tensor in simulated memory of the open region.

    The memory is freed when the last tensor in it is deleted. If `dtype` is None, the tensor has
    torch's default dtype.

    Raises:
        ConfigError: the shape, the dtype or the device is invalid.
        InvalidStateError: no region is open for this device, or the driver is not simulated.
        NotLoadedError: torch is not installed.
        OutOfDeviceMemoryError: the simulated device is full.
    """
    dims = _dims(shape)
    try:
        import torch
    except ImportError:
        raise NotLoadedError(
            "simulator.empty makes a torch tensor, and torch is not installed: `pip install torch` "
            "or use simulator.buffer(nbytes), which does not need it"
        ) from None

    pickling.register(torch)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"a dtype is one of torch's, such as torch.float32, not {dtype!r}")
    items = math.prod(dims)
    if items == 0:
        return torch.empty(dims, dtype=dtype)
    block = Buffer(items * dtype.itemsize, device)
    return torch.frombuffer(block.array, dtype=dtype, count=items).reshape(dims)


def _dims(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        shape = (shape,)
    return tuple(_count(size, "each size of a shape") for size in shape)
