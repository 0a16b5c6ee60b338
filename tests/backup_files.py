"""Unnamed files of disk backups: finding them, and damaging them from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def deleted_files(folder: str | Path) -> list[int]:
    """List the descriptors of this process whose files lie in a folder without a name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{number}")
            if where.startswith(f"{folder}/") and where.endswith(" (deleted)"):
                found.append(int(number))
    return found


def first_data(file: int) -> int:
    """Return the offset of the first byte that a file holds."""
    return os.lseek(file, 0, os.SEEK_DATA)


def overwrite(file: int, at: int, data: bytes) -> bytes:
    """Replace bytes of a file that has no name, and return those that stood there."""
    with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as again:
        before = os.pread(again.fileno(), len(data), at)
        os.pwrite(again.fileno(), data, at)
    return before


def flip(file: int, at: int) -> None:
    """Flip a bit of a byte of a file that has no name."""
    with open(f"/proc/self/fd/{file}", "rb", buffering=0) as again:
        (byte,) = os.pread(again.fileno(), 1, at)
    overwrite(file, at, bytes([byte ^ 1]))


def truncate(file: int, size: int) -> None:
    """Cut a file that has no name."""
    os.truncate(f"/proc/self/fd/{file}", size)
