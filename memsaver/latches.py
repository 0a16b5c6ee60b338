"""Waiting for other threads in a way that an interrupt can end without harm to them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from memsaver.interrupts import signals_deferred
from memsaver.native import _C

__all__ = ["Gate", "Latch"]


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
        """Let all go on that wait, and will. May be done again, as where an interrupt ended it."""
        self._is_open = True
        for waiter in tuple(self._waiters):  # each leaves the list when it wakes
            with contextlib.suppress(RuntimeError):  # released already
                waiter.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it opened within so many seconds; None waits without end. Can be interrupted."""
        if not self._is_open:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self._is_open:  # it opens before it looks for waiters
                waiter.acquire(timeout=-1 if seconds is None else max(seconds, 0))
            self._waiters.remove(waiter)
        return self._is_open


class Gate:
    """Lets one block in at a time, of whichever thread. No thread waits for itself.

    As `threading.Lock` with a timeout, of which an interrupt can come when it is taken, and before
    anybody knows.

    Args:
        reentrant: the thread that is in a block may enter further ones.
    """

    def __init__(self, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._lock = threading.RLock()  # of what follows; nothing waits in it
        self._inside: list[int] = []  # the thread that is in a block, once for each block
        self._left = Latch()  # opened and replaced when a block is left

    @contextlib.contextmanager
    def passed(self, seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
        """For the block, no other is in one.

        What `late` returns is raised after that many seconds; at once if this thread is in a block,
        and the gate is not reentrant.
        """
        taken: list[bool] = []
        give = functools.partial(self._give, taken)
        try:
            if not self._take(time.monotonic() + seconds, taken):
                raise late()
            yield
        finally:
            _C.uninterrupted(give, True)

    def _take(self, deadline: float, taken: list[bool]) -> bool:
        while True:
            with signals_deferred(), self._lock:
                me = threading.get_ident()
                is_inside = bool(self._inside) and self._inside[0] == me
                if not self._inside or (self._reentrant and is_inside):
                    self._inside.append(me)
                    taken.append(True)
                    return True
                if is_inside:
                    return False
                left = self._left
            if not left.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                return False

    def _give(self, taken: list[bool]) -> None:
        with self._lock:
            if taken:
                self._inside.pop()
                left, self._left = self._left, Latch()
                left.open()
