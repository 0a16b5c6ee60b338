"""Defines the possible faults: a call's name and number, the error code, and how often it fails."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass

from repository import ROOT

# Every entry point that the library uses, including future ones. The two without a simulated
# counterpart only return the names of errors, so their failures do not matter.
DRIVER_CALLS = [
    name
    for name in re.findall(r"X\((cu\w+)\)", (ROOT / "csrc/core/driver/driver.h").read_text())
    if name not in ("cuGetErrorName", "cuGetErrorString")
]

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED = 1, 2, 712
INVALID_IMAGE, INVALID_CONTEXT, NO_BINARY, NOT_FOUND = 200, 201, 209, 500
OPERATING_SYSTEM = 304
ILLEGAL_ADDRESS, LAUNCH_FAILED, NOT_SUPPORTED = 700, 719, 801
CAPTURE_UNSUPPORTED, UNKNOWN = 900, 999

SHORT = -1  # os_faults: half of a transfer takes place

# The known error codes of each call, besides those of any call (earlier failures of device work).
# 4, 709 and 3 are not included: they report that the process's driver has ended with its memory,
# so that nothing can be released (tests/process/test_process.py).
_DRIVER_CODES = {
    "cuInit": [INVALID_VALUE, UNKNOWN],
    "cuMemCreate": [OUT_OF_MEMORY, INVALID_VALUE, LAUNCH_FAILED],
    "cuMemAddressReserve": [OUT_OF_MEMORY, INVALID_VALUE],
    "cuMemAddressFree": [INVALID_VALUE],
    "cuMemExportToShareableHandle": [INVALID_VALUE, OPERATING_SYSTEM],
    "cuMemImportFromShareableHandle": [OUT_OF_MEMORY, INVALID_VALUE, OPERATING_SYSTEM],
    "cuMemMap": [OUT_OF_MEMORY, INVALID_VALUE],
    "cuMemSetAccess": [OUT_OF_MEMORY, INVALID_VALUE],
    "cuMemAlloc": [OUT_OF_MEMORY, LAUNCH_FAILED],
    "cuMemHostRegister": [OUT_OF_MEMORY, INVALID_VALUE, ALREADY_REGISTERED, NOT_SUPPORTED],
    "cuStreamCreate": [OUT_OF_MEMORY, LAUNCH_FAILED],
    "cuEventCreate": [OUT_OF_MEMORY, LAUNCH_FAILED],
    "cuModuleLoadData": [OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY],
    "cuModuleGetFunction": [OUT_OF_MEMORY, NOT_FOUND],
    "cuLaunchKernel": [OUT_OF_MEMORY, LAUNCH_FAILED],
    "cuCtxPushCurrent": [INVALID_CONTEXT, LAUNCH_FAILED],
    "cuCtxGetCurrent": [INVALID_CONTEXT],
    "cuMemcpyDtoHAsync": [INVALID_VALUE, ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED],
    "cuMemcpyDtoDAsync": [INVALID_VALUE, ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED],
    "cuMemcpyHtoDAsync": [INVALID_VALUE, ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED],
    "cuStreamSynchronize": [ILLEGAL_ADDRESS, LAUNCH_FAILED, CAPTURE_UNSUPPORTED],
}
_ANY_DRIVER_CODES = [INVALID_VALUE, LAUNCH_FAILED]

# From each call's manual page. EINTR occurs only once: a call that is always interrupted has not
# failed.
_OS_CODES = {
    "mmap": [errno.ENOMEM, errno.EAGAIN],
    "munmap": [errno.ENOMEM],
    "madvise": [errno.EINVAL, errno.EAGAIN],
    "mbind": [errno.EINVAL, errno.EPERM, errno.ENOSYS],
    "open": [errno.EMFILE, errno.ENOENT, errno.EACCES],
    "open_unnamed": [errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.EOPNOTSUPP, errno.EISDIR],
    "mkostemp": [errno.ENOSPC, errno.EMFILE, errno.EROFS],
    "fcntl": [errno.EINVAL],
    "fstat": [errno.EIO],
    "statvfs": [errno.EIO],
    "fallocate": [
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EOPNOTSUPP,
        errno.EINTR,
    ],
    "pread": [errno.EIO, errno.EINVAL, errno.EINTR, SHORT],
    "pwrite": [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINVAL, errno.EINTR, SHORT],
    "read": [errno.EIO, errno.EINTR],
    "sync_file_range": [errno.EIO, errno.ENOSPC, errno.ENOSYS, errno.EINTR],
    "posix_fadvise": [errno.EINVAL],
    "ftruncate": [errno.EIO],
    "close": [errno.EIO],
    "pthread_create": [errno.EAGAIN],
    "malloc": [errno.ENOMEM],
}
OS_CALLS = list(_OS_CODES)

# Failures of these calls must not be visible to memsaver's caller: the operation must succeed. (A
# file that cannot be queried is treated as a file without the value.)
OS_TOLERATED = {
    "munmap", "madvise", "mbind", "open", "fstat", "statvfs", "read", "posix_fadvise", "ftruncate",
    "close", "pthread_create",
}  # fmt: skip


@dataclass(frozen=True)
class Injection:
    """The `nth` call to a function (counted from 1) in a scenario's act fails with `code`.

    With `forever`, every later call of this function also fails until the act ends.
    """

    scenario: str
    call: str
    nth: int
    code: int
    forever: bool

    @property
    def of_driver(self) -> bool:
        return self.call.startswith("cu")

    def __str__(self) -> str:
        return (
            f"{self.scenario}:{self.call}:{self.nth}:{self.code}"
            f":{'forever' if self.forever else 'once'}"
        )

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Parse an injection. Raises ValueError for invalid text."""
        parts = text.split(":")
        if len(parts) != 5 or parts[4] not in ("once", "forever"):
            raise ValueError(f"{text!r} is not scenario:call:nth:code:once or ...:forever")
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]), parts[4] == "forever")


def codes_of(call: str) -> list[int]:
    if call.startswith("cu"):
        return _DRIVER_CODES.get(call, _ANY_DRIVER_CODES)
    return _OS_CODES[call]


def injections_of(scenario: str, counts: dict[str, int]) -> Iterator[Injection]:
    """Yield all faults that can occur in an act that makes these calls."""
    for call, count in counts.items():
        for nth in range(1, count + 1):
            for code in codes_of(call):
                yield Injection(scenario, call, nth, code, False)
                if code not in (errno.EINTR, SHORT) or call.startswith("cu"):
                    yield Injection(scenario, call, nth, code, True)
