"""Helpers that find the unnamed files of disk backups and corrupt their contents."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def deleted_files(folder: str | Path) -> list[int]:
    """List this process's descriptors of unnamed files in a folder."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{number}")
            if where.startswith(f"{folder}/") and where.endswith(" (deleted)"):
                found.append(int(number))
    return found


def first_data(file: int) -> int:
    """Return the file offset at which the first data begins."""
    return os.lseek(file, 0, os.SEEK_DATA)


def overwrite(file: int, at: int, data: bytes) -> bytes:
    """Replace bytes of an unnamed file and return the old bytes."""
    with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as again:
        before = os.pread(again.fileno(), len(data), at)
        os.pwrite(again.fileno(), data, at)
    return before


def flip(file: int, at: int) -> None:
    """Flip one bit of an unnamed file."""
    with open(f"/proc/self/fd/{file}", "rb", buffering=0) as again:
        (byte,) = os.pread(again.fileno(), 1, at)
    overwrite(file, at, bytes([byte ^ 1]))


def truncate(file: int, size: int) -> None:
    """Truncate an unnamed file."""
    os.truncate(f"/proc/self/fd/{file}", size)
