"""Wait for other threads; an interrupt does not damage shared state."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C

__all__ = ["Gate", "Latch"]


class Latch:
    """A one-shot event. Any thread may use it.

    Unlike `threading.Event`, an interrupt in `wait` cannot release a lock that another thread owns,
    because waiting threads share no lock.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[threading.Lock] = []  # each locked until the event is set

    def is_open(self) -> bool:
        """Return whether the event was set."""
        return self._is_open

    def open(self) -> None:
        """Set the event and wake all waiters. May be repeated, for example after an interrupt."""
        self._is_open = True
        for waiter in tuple(self._waiters):  # each waiter removes itself when it wakes
            with contextlib.suppress(RuntimeError):  # released already
                waiter.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the event was set within `seconds`; None: no limit. Interruptible."""
        if not self._is_open:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self._is_open:  # `open` sets the flag before it reads the list
                waiter.acquire(timeout=-1 if seconds is None else max(seconds, 0))
            self._waiters.remove(waiter)
        return self._is_open


class Gate:
    """Mutual exclusion for blocks. A thread never waits for itself.

    Like `threading.Lock` with a timeout, but an interrupt cannot occur between the acquisition of
    the lock and its recording.

    Args:
        reentrant: whether the thread that is in a block may enter further blocks.
    """

    def __init__(self, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._lock = threading.RLock()  # guards the fields below; locked only briefly
        self._inside: list[int] = []  # the thread that is in a block, once per nested block
        self._left = Latch()  # set and replaced when a block is left

    @contextlib.contextmanager
    def passed(self, seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
        """Exclude other threads for the block.

        Calls `late` after `seconds` and raises its result; immediately if this thread is already in
        a block and the gate is not reentrant.
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
