"""What memsaver raises and warns.

Every error says what happened, with which tag and how many bytes, and what to do. After one,
nothing is lost and nothing is half-done: a failed pause leaves its tags mapped, a failed resume
leaves them paused with their backups.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memsaver.redaction import redacted

if TYPE_CHECKING:
    from memsaver.shortages import DeviceProcess, Holder

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
    "UnknownTagError",
]


class MemsaverWarning(RuntimeWarning):
    """A failure that could reach no caller, such as memory of a deleted tensor that stays held.

    And what costs silently: see `PerformanceWarning`.
    """


class PerformanceWarning(MemsaverWarning):
    """Something that works, and silently costs memory or time. Once for each tag.

    `warnings.simplefilter("ignore", memsaver.PerformanceWarning)` silences them.
    """


class MemsaverError(RuntimeError):
    """The base of all errors of memsaver.

    Attributes:
        status: the name of the C ABI's status, such as "OUT_OF_DEVICE_MEMORY".
        cuda_error: the CUresult of `call`, 0 where no driver call failed.
        call: the CUDA driver call that failed, or "".
        os_error: the errno of a file operation that failed, 0 where none did.
        tag: the tag concerned (at most its first 127 bytes), or "".
    """

    os_error: int = 0
    _status = "INTERNAL"  # of a kind, where nobody says more

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
    """Device memory is not to be had; the same call may succeed once some is free.

    Attributes:
        needed: bytes that the call needed on the device.
        free: bytes that were free there.
        device: the device's index; -1 where that is not known, and the two below are empty then.
        holders: the tags that held memory there when the error was made, those with most first,
            and which of them could have been paused.
        processes: other processes that held memory there, those with most first. NVML says so,
            where nvidia-ml-py is installed (`pip install "memsaver[nvml]"`); else empty.
    """

    _status = "OUT_OF_DEVICE_MEMORY"
    needed: int = 0
    free: int = 0
    device: int = -1
    holders: tuple[Holder, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()


class OutOfHostMemoryError(MemsaverError):
    """A backup found no host memory, or none that could be pinned.

    Attributes:
        needed: bytes that could not be had.
        free: bytes that could have been had, where that is known, else 0.
    """

    _status = "OUT_OF_HOST_MEMORY"
    needed: int = 0
    free: int = 0


class InvalidStateError(MemsaverError):
    """A valid call at the wrong time: a region of a paused tag, a pause inside a capture."""

    _status = "INVALID_STATE"


class UnknownTagError(MemsaverError, KeyError):
    """No region ever named the tag. The message lists the known ones."""

    _status = "UNKNOWN_TAG"


class BackupError(MemsaverError, OSError):
    """A backup could not be written or read; `errno` and `strerror` say why, as in any OSError.

    If a pause raises it, the tags are mapped, with their contents. If a resume raises it, the tags
    are paused, and another resume may succeed. If the file is damaged, free the tag's tensors (with
    torch, call `torch.cuda.empty_cache()` afterwards), resume the tag, and load its contents again.
    The next pause writes a new file.

    Attributes:
        needed: bytes that the failed operation should have reserved, written or read.
        free: bytes that were free on the disk if it was full, else 0.
    """

    _status = "BACKUP_FAILED"
    needed: int = 0
    free: int = 0


class DriverError(MemsaverError):
    """A CUDA driver call failed; `call` and `cuda_error` say which, and how."""

    _status = "DRIVER_FAILED"


class NotLoadedError(MemsaverError):
    """What the call needs is not there: a driver, a GPU, torch with CUDA, the native library."""

    _status = "NOT_LOADED"


class ConfigError(MemsaverError, ValueError):
    """A value that no state would make valid: an empty tag, an unknown backup or option."""

    _status = "BAD_CONFIG"


# The values of ms_status in memsaver.h.
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
}


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
    """The exception for a status of the C ABI. Called by `memsaver._C`."""
    name, kind = _STATUSES.get(status, ("INTERNAL", MemsaverError))
    if kind is OutOfDeviceMemoryError:
        message = "CUDA out of memory: " + message
    error = kind(message, status=name, cuda_error=cuda_error, call=call, tag=tag)
    error.os_error = os_error
    if isinstance(error, BackupError) and os_error:
        error.errno, error.strerror = os_error, os.strerror(os_error)
    if isinstance(error, OutOfDeviceMemoryError | OutOfHostMemoryError | BackupError):
        error.needed, error.free = needed, free
    if isinstance(error, OutOfDeviceMemoryError):
        from memsaver.shortages import add_holders  # which needs the native library

        error.device = device
        add_holders(error)
    return error
