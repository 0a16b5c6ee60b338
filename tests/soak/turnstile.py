"""A lock between processes, based on file locks, which are released when their process exits."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turnstile:
    """An inter-process lock, which is shared or exclusive.

    A process first locks the file "door", so that an exclusive lock does not wait indefinitely.
    """

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("a")
        self._room = (folder / "room").open("a")

    @contextlib.contextmanager
    def passing(self, alone: bool) -> Iterator[None]:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
