"""Functions of a loaded NCCL library that release and restore a communicator's memory.

NCCL has provided these functions since version 2.29.7. A suspended communicator keeps its
connections and its addresses, so CUDA graphs that contain its kernels stay valid. Until the
communicator is resumed, any use of it is an illegal memory access. Both functions wait for the
communicator's other ranks. The functions apply only to memory that NCCL allocates with the driver's
virtual memory functions (NCCL_CUMEM_ENABLE=1).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

from memsaver._runtime.background import start_daemon

from . import held
from .errors import EngineError, EngineTimeoutError

__all__ = ["SECONDS", "SINCE", "Call", "Communicator", "Key", "Nccl", "loaded"]

SINCE = 22907  # the first version with the functions, as ncclGetVersion returns it
# The longest wait for the other ranks, shorter than a controller's timeout for an operation.
SECONDS = 20.0

_MEMORY = 0x01  # NCCL_SUSPEND_MEM
Key = tuple[str, tuple[int, ...]]  # a communicator's name and ranks
# Members of ncclCommMemStat_t.
_SUSPENDABLE, _SUSPENDED, _TOTAL = 0, 1, 3
_FILE = "libnccl.so.2"


class Nccl:
    """A loaded NCCL library. Any thread may make calls.

    Args:
        library: the loaded library; a library without these functions is treated as an old version.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def version(self) -> int:
        """The library's version, such as 22907 for 2.29.7; 0 if the version is unknown."""
        found = ctypes.c_int(0)
        try:
            self._library.ncclGetVersion(ctypes.byref(found))
        except AttributeError:
            return 0
        return found.value

    @property
    def can_suspend(self) -> bool:
        """Whether the library can release a communicator's memory."""
        return self.version >= SINCE and hasattr(self._library, "ncclCommSuspend")

    def begin_suspend(self, handle: int) -> Call:
        """Start releasing a communicator's memory. The returned call waits for the other ranks."""
        arguments = ctypes.c_void_p(handle), ctypes.c_int(_MEMORY)
        return Call("ncclCommSuspend", self._library.ncclCommSuspend, *arguments)

    def begin_resume(self, handle: int) -> Call:
        """Start allocating a suspended communicator's memory again. See `begin_suspend`."""
        return Call("ncclCommResume", self._library.ncclCommResume, ctypes.c_void_p(handle))

    def suspendable_bytes(self, handle: int) -> int:
        """Return the number of bytes that suspending releases or released. Raises `EngineError`."""
        return self._statistic(handle, _SUSPENDABLE)

    def held_bytes(self, handle: int) -> int:
        """Return the number of bytes that the communicator uses on the device.

        Raises:
            EngineError: NCCL does not report the number. NCCL counts only memory that it allocates
                with the driver's virtual memory functions (NCCL_CUMEM_ENABLE=1).
        """
        total = self._statistic(handle, _TOTAL)
        if total == 0:
            raise EngineError("NCCL does not count the communicator's memory (NCCL_CUMEM_ENABLE=0)")
        released = self.suspendable_bytes(handle) if self.is_suspended(handle) else 0
        return max(0, total - released)

    def is_suspended(self, handle: int) -> bool:
        """Return whether a communicator is suspended. Raises `EngineError`."""
        return self._statistic(handle, _SUSPENDED) != 0

    def _statistic(self, handle: int, which: int) -> int:
        value = ctypes.c_uint64(0)
        arguments = (ctypes.c_void_p(handle), ctypes.c_int(which), ctypes.byref(value))
        _check("ncclCommMemStats", self._library.ncclCommMemStats(*arguments))
        return value.value


class Call:
    """A call that runs on its own thread, because it waits for other ranks.

    Args:
        name: the function's name.
        function: the function to call, which returns NCCL's status.
        arguments: the function's arguments.
    """

    def __init__(self, name: str, function: Callable[..., int], *arguments: object) -> None:
        self._name = name
        self._status: concurrent.futures.Future[int] = concurrent.futures.Future()
        device = held.device()

        def work() -> None:
            try:
                held.use_device(device)  # NCCL synchronizes the thread's current device
                self._status.set_result(function(*arguments))
            except BaseException as error:
                self._status.set_exception(error)

        try:
            # NCCL cannot cancel the wait, so the thread keeps waiting after a timeout.
            start_daemon("nccl", work)
        except RuntimeError as error:  # `wait` raises it, like every other failure
            self._status.set_exception(error)

    def wait(self, seconds: float) -> None:
        """Wait for the call to finish.

        Raises:
            EngineError: NCCL reports an error.
            EngineTimeoutError: another rank did not make the call in time.
            RuntimeError: no thread could be started.
        """
        concurrent.futures.wait([self._status], seconds)
        if not self._status.done():
            raise EngineTimeoutError(
                f"{self._name} did not end in {SECONDS:g} s: another rank of the communicator did "
                "not make the call; restart the engine"
            )
        _check(self._name, self._status.result())


def _check(function: str, status: int) -> None:
    if status:
        raise EngineError(f"{function} failed with NCCL's error {status}")


@dataclass(frozen=True)
class Communicator:
    """A communicator in this process.

    Attributes:
        name: the communicator's name, which is the same on all of its ranks.
        ranks: the communicator's members as ranks in the engine's world, in the communicator's
            order.
        rank: this process's rank in the communicator.
        handle: the address of NCCL's object.
        nccl: the library that created the communicator.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: int
    nccl: Nccl

    @property
    def key(self) -> Key:
        """An identifier of the communicator, the same on all of its ranks."""
        return self.name, self.ranks


def loaded() -> Nccl | None:
    """Return the NCCL library that torch has loaded in this process; None if there is none."""
    try:
        return Nccl(ctypes.CDLL(_FILE, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    except OSError:
        return None
