"""The simulated CUDA driver (MEMSAVER_DRIVER=sim): rollout code on a laptop, faults on demand.

Simulated device memory is host memory at the simulated addresses, so CPU code can read and write it
directly; paused memory faults when touched, as on a GPU. torch cannot allocate there by itself:
`empty` makes a CPU tensor over memory of the open region. What it cannot show: kernels other than
memsaver's own, torch's allocator, the speed of anything.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memsaver import pickling
from memsaver.blocks import block
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.native import _C, LIBRARY_DIR, emit_warnings

if TYPE_CHECKING:
    import torch

__all__ = ["active", "buffer", "control", "empty", "fault"]


def active() -> bool:
    """Whether this process runs on the simulated driver. Opens the driver."""
    return _C.driver_info()[2]


def control() -> ctypes.CDLL:
    """The simulator's control functions, with the types that csrc/sim/sim.h gives them."""
    library = ctypes.CDLL(str(LIBRARY_DIR / "libmemsaver_sim.so"))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sim_fail": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64]),
    "sim_clear_faults": (None, []),
    "sim_calls": (ctypes.c_uint64, [ctypes.c_char_p]),
    "sim_violation": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]),
    "sim_clear_violations": (None, []),
    "sim_occupy": (ctypes.c_int, [ctypes.c_int, ctypes.c_uint64]),
    "sim_host_limit": (None, [ctypes.c_uint64]),
    "sim_stream_delay": (None, [ctypes.c_uint64]),
    "sim_copy_rate": (None, [ctypes.c_uint64]),
    "sim_hold_streams": (None, [ctypes.c_int]),
    "sim_deinitialize": (None, [ctypes.c_int]),
}


@block
def fault(call: str, code: int, *, nth: int = 1, times: int = 1) -> Iterator[None]:
    """Make the `nth` coming driver call of that name, and `times - 1` after it, fail with `code`.

    `times=0` is for ever, until the block ends. The call has no effect then.

    Raises:
        ConfigError: the simulator has no such call.
    """
    library = control()
    if library.sim_fail(call.encode(), nth, code, times) != 0:
        raise ConfigError(f"the simulated driver has no call {call!r}, or nth is zero")
    try:
        yield
    finally:
        library.sim_clear_faults()


class Buffer:
    """Device memory of the open region as a writable buffer; freed with the last reference."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        if not active():
            raise InvalidStateError("simulated memory needs MEMSAVER_DRIVER=sim")
        self.address = _C.malloc(nbytes, device)
        self.nbytes = nbytes
        self.array = (ctypes.c_char * nbytes).from_address(self.address)
        # The array may outlive this object, in a tensor over it; the memory lives as long as it.
        weakref.finalize(self.array, _free, self.address)


def _free(address: int) -> None:
    _C.free(address)
    emit_warnings()


def buffer(nbytes: int, device: int = 0) -> Buffer:
    """Simulated device memory in the tag of the open region, uninitialised."""
    return Buffer(nbytes, device)


def empty(shape: Sequence[int] | int, dtype: Any = None, device: int = 0) -> torch.Tensor:
    """A CPU torch tensor over simulated device memory of the open region, uninitialised.

    Freed when the last tensor over it is gone. `dtype` is torch's default where None.

    Raises:
        InvalidStateError: no region is open, or the driver is a real one.
        OutOfDeviceMemoryError: the simulated device is full.
    """
    import torch

    pickling.register(torch)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = dtype or torch.get_default_dtype()
    items = math.prod(dims)
    if items == 0:
        return torch.empty(dims, dtype=dtype)
    block = Buffer(items * dtype.itemsize, device)
    return torch.frombuffer(block.array, dtype=dtype, count=items).reshape(dims)
