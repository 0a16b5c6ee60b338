"""Waiting for what happens once, in a way that an interrupt can end without harm to others."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["Latch"]


class Latch:
    """Closed until it is opened, once and for all. Any thread may use this.

    As `threading.Event`, of which an interrupt in `wait` can release the lock that another thread
    is in: this one has none that is shared.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[threading.Lock] = []  # each held until the latch opens

    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._is_open

    def open(self) -> None:
        """Let all go on that wait, and will. Doing so twice is allowed."""
        self._is_open = True
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.pop().release()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it opened within so many seconds; None waits without end. Can be interrupted."""
        if not self._is_open:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self._is_open:  # it opens before it looks for waiters
                waiter.acquire(timeout=-1 if seconds is None else max(seconds, 0))
            with contextlib.suppress(ValueError):  # it has opened
                self._waiters.remove(waiter)
        return self._is_open
