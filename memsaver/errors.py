"""memsaver's exceptions and warnings.

Every error message states the problem, the tag, the number of bytes, and a solution. After a failed
pause, the tags are mapped (or, if the error says that the pause could not be undone, paused with
all their contents), and after a failed resume, they are paused with their backups; only `swap` and
`memsaver.distributed` may lose contents that have no backup.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from memsaver._runtime.redaction import redacted

if TYPE_CHECKING:
    from memsaver._memory.device_processes import DeviceProcess
    from memsaver._memory.shortages import Holder

__all__ = [
    "BackupError",
    "ConfigError",
    "DriverError",
    "InvalidStateError",
    "MemsaverError",
    "MemsaverWarning",
    "NotLoadedError",
    "OutOfDeviceMemoryError",
    "OutOfHostMemoryError",
    "PerformanceWarning",
    "SharingError",
    "TagSharedError",
    "UnknownTagError",
    "UsageWarning",
]


class MemsaverWarning(RuntimeWarning):
    """A failure that could not be raised as an error, such as a failed release of a deleted
    tensor's memory.

    See also `PerformanceWarning` for hidden costs, and `UsageWarning` for probable mistakes.
    """


class PerformanceWarning(MemsaverWarning):
    """A warning about code that needs more memory or time than necessary.

    Each such warning is emitted once for each tag. To silence them, call
    `warnings.simplefilter("ignore", memsaver.PerformanceWarning)`.
    """


class UsageWarning(MemsaverWarning):
    """A warning about a probable mistake, such as the first pause of a tag without memory."""


class MemsaverError(RuntimeError):
    """The base class of all memsaver errors.

    Attributes:
        status: the name of the C ABI's status, such as "OUT_OF_DEVICE_MEMORY".
        cuda_error: the CUresult of `call`, or 0 if no driver call failed.
        call: the CUDA driver call that failed, or "".
        os_error: the errno of the file operation that failed, or 0.
        tag: the first 127 bytes of the affected tag's name, or "".
    """

    os_error: int = 0
    _status = "INTERNAL"  # the default for a class

    def __init__(
        self, message: str, *, status: str = "", cuda_error: int = 0, call: str = "", tag: str = ""
    ) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self.status = status or self._status
        self.cuda_error = cuda_error
        self.call = call
        self.tag = tag

    def __str__(self) -> str:
        return self.message


class OutOfDeviceMemoryError(MemsaverError):
    """There is not enough device memory. The same call can succeed after memory is freed.

    Attributes:
        needed: bytes that the call needed on the device.
        free: bytes that were free on the device.
        device: the device's index, or -1 if unknown. If the device is unknown, the attributes below
            are empty.
        holders: the tags with memory on the device when the error was created, largest first. Each
            entry states whether the tag could have been paused.
        processes: other processes with memory on the device, largest first, as reported by NVML.
            The list is empty unless nvidia-ml-py is installed (`pip install "memsaver[nvml]"`).
    """

    _status = "OUT_OF_DEVICE_MEMORY"
    needed: int = 0
    free: int = 0
    device: int = -1
    holders: tuple[Holder, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()


class OutOfHostMemoryError(MemsaverError):
    """A backup needs more host memory than is available or can be pinned.

    Attributes:
        needed: bytes that could not be allocated.
        free: bytes that were available, or 0 if unknown.
    """

    _status = "OUT_OF_HOST_MEMORY"
    needed: int = 0
    free: int = 0


class InvalidStateError(MemsaverError):
    """A call that is invalid in the current state, such as a region of a paused tag."""

    _status = "INVALID_STATE"


class TagSharedError(InvalidStateError):
    """A pause was rejected, because other processes use tensors of the tag.

    Attributes:
        importers: the id and the imported bytes of each process. The bytes are the total size of
            all memory pieces that contain the process's tensors.
    """

    _status = "TAG_SHARED"
    importers: tuple[tuple[int, int], ...] = ()


class SharingError(MemsaverError):
    """A tensor cannot be sent to another process, or cannot be received.

    Possible reasons: the tensor's tag is paused, the tensor was freed, the process that sent it has
    ended, or the two processes belong to different users.
    """

    _status = "SHARING_FAILED"


class UnknownTagError(MemsaverError, KeyError):
    """No region has ever named the tag. The message lists the known tags."""

    _status = "UNKNOWN_TAG"


class BackupError(MemsaverError, OSError):
    """A backup could not be written or read. See `errno` and `strerror`, as for any OSError.

    If a pause raises this error, the tags are mapped and their contents are intact. If a resume
    raises it, the tags are paused, and another resume may succeed. If the file is damaged, free the
    tag's tensors (with torch, call `torch.cuda.empty_cache()` afterwards), resume the tag, and load
    its contents again. The next pause writes a new file.

    Attributes:
        needed: the number of bytes that the failed operation tried to reserve, write or read.
        free: the number of bytes that were free on the disk if the disk was full, otherwise 0.
    """

    _status = "BACKUP_FAILED"
    needed: int = 0
    free: int = 0

    # Derived, because pickling and copying an OSError lose values that were assigned.
    @property
    def errno(self) -> int | None:  # type: ignore[override]
        """The value of `os_error`; None if no file operation failed."""
        return self.os_error or None

    @property
    def strerror(self) -> str | None:  # type: ignore[override]
        """The system's message for `errno`; None if no file operation failed."""
        return os.strerror(self.os_error) if self.os_error else None


class DriverError(MemsaverError):
    """A CUDA driver call failed. See `call` and `cuda_error`."""

    _status = "DRIVER_FAILED"


class NotLoadedError(MemsaverError):
    """The call needs something that is missing, such as a driver, a GPU or a torch with CUDA."""

    _status = "NOT_LOADED"


class ConfigError(MemsaverError, ValueError):
    """An invalid argument or option, such as an empty tag or an unknown backup."""

    _status = "BAD_CONFIG"


# The values of `ms_status` in memsaver.h.
_STATUSES: dict[int, tuple[str, type[MemsaverError]]] = {
    1: ("INVALID_ARGUMENT", ConfigError),
    2: ("INVALID_STATE", InvalidStateError),
    3: ("UNKNOWN_TAG", UnknownTagError),
    4: ("OUT_OF_DEVICE_MEMORY", OutOfDeviceMemoryError),
    5: ("OUT_OF_HOST_MEMORY", OutOfHostMemoryError),
    6: ("BACKUP_FAILED", BackupError),
    7: ("DRIVER_FAILED", DriverError),
    8: ("NOT_LOADED", NotLoadedError),
    9: ("BAD_CONFIG", ConfigError),
    10: ("NOT_OURS", ConfigError),
    11: ("INTERNAL", MemsaverError),
    12: ("TAG_SHARED", TagSharedError),
    13: ("SHARING_FAILED", SharingError),
}


# Called with each new error that the C ABI returns, to add facts that need the native library, such
# as the holders of memory (`_memory.shortages`) or a tag with a similar name (`_runtime.native`).
completions: list[Callable[[MemsaverError], None]] = []


def error_of(
    status: int,
    message: str,
    cuda_error: int,
    call: str,
    tag: str,
    needed: int,
    free: int,
    os_error: int,
    device: int = -1,
) -> MemsaverError:
    """Return the exception for a status of the C ABI. Called by `memsaver._C`."""
    name, kind = _STATUSES.get(status, ("INTERNAL", MemsaverError))
    if kind is OutOfDeviceMemoryError:
        message = "CUDA out of memory: " + message
    error = kind(message, status=name, cuda_error=cuda_error, call=call, tag=tag)
    error.os_error = os_error
    if isinstance(error, OutOfDeviceMemoryError | OutOfHostMemoryError | BackupError):
        error.needed, error.free = needed, free
    if isinstance(error, OutOfDeviceMemoryError):
        error.device = device
    for complete in completions:
        complete(error)
    return error
