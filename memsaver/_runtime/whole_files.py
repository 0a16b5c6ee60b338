"""Write files completely or not at all, even if the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(target: Path, content: bytes) -> None:
    """Write the content to a new file, or replace an existing file.

    A replaced file keeps its mode and, if the system allows it, its owner and group. Otherwise, the
    group has no access rights. During the write, no user has more access rights than the finished
    file grants. If the target is a link, the function replaces the file that the link points to.

    The function writes directly to a device, a pipe, or a mount point, such as a file that is
    mounted into a container. A failed write to a mount point leaves an incomplete file.

    Raises:
        OSError: the file cannot be written. The error names the target. An existing file is
            unchanged, unless the function writes directly to it.
    """
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            _replace(target.resolve(), content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _replace(target: Path, content: bytes) -> None:
    # Short and independent of the target's name, which may be as long as the system allows.
    fresh = target.with_name(f".memsaver-{os.urandom(4).hex()}")
    before = target.stat() if target.exists() else None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        # The existing file's rights are set last: until then only this user can read the file.
        with os.fdopen(os.open(fresh, flags, 0o600 if before else 0o666), "wb") as file:
            file.write(content)
            if before:
                file.flush()
                _give_rights(file.fileno(), before)
        try:
            os.replace(fresh, target)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            target.write_bytes(content)
            fresh.unlink()
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _give_rights(file: int, before: os.stat_result) -> None:
    """Set a file's owner, group and mode to the values of the file that it replaces."""
    mode = stat.S_IMODE(before.st_mode) & 0o777
    with contextlib.suppress(OSError):
        os.chown(file, before.st_uid, before.st_gid)
    if os.fstat(file).st_gid != before.st_gid:
        with contextlib.suppress(OSError):
            os.chown(file, -1, before.st_gid)
    if os.fstat(file).st_gid != before.st_gid:
        mode &= ~0o070
    os.fchmod(file, mode)
