"""The requests that go by one controller: counted, and kept out while the engine sleeps."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from memsaver.integrations.sglang.errors import EngineBusyError
from memsaver.interrupts import signals_deferred
from memsaver.latches import Latch
from memsaver.native import _C

__all__ = ["Requests", "busy"]


class Requests:
    """Counts requests, and lets none begin while it is closed. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of what follows; nothing waits in it
        self._under_way = 0
        self._closed = False
        self._ended = Latch()  # opened and replaced when a request is over

    @property
    def closed(self) -> bool:
        """Whether no request may begin now."""
        return self._closed

    @contextlib.contextmanager
    def one(self, check: Callable[[], None]) -> Iterator[None]:
        """For the block, a request is under way. What `check` raises keeps it from beginning."""
        counted: list[bool] = []
        count_down = functools.partial(self._count_down, counted)
        try:
            with signals_deferred(), self._lock:
                check()
                self._under_way += 1
                counted.append(True)
            yield
        finally:
            _C.uninterrupted(count_down, True)

    def _count_down(self, counted: list[bool]) -> None:
        with self._lock:
            if counted:
                self._under_way -= 1
                ended, self._ended = self._ended, Latch()
                ended.open()

    @contextlib.contextmanager
    def none(
        self, wait: bool, hurry: Callable[[], None], left: Callable[[], float]
    ) -> Iterator[None]:
        """For the block, no request is under way, and none begins.

        Args:
            wait: wait for those under way, instead of refusing.
            hurry: called before waiting; may make them end.
            left: the seconds left to wait for them.

        Raises:
            EngineBusyError: requests are under way, at the end of the time where it waits.
        """
        closed: list[bool] = []
        open_again = functools.partial(self._open, closed)
        try:
            with signals_deferred(), self._lock:
                if self._under_way and not wait:
                    raise busy()
                self._closed = True
                closed.append(True)
            hurry()
            self._wait(left)
            yield
        finally:
            _C.uninterrupted(open_again, True)

    def _wait(self, left: Callable[[], float]) -> None:
        in_time = True
        while True:
            with self._lock:
                if not self._under_way:
                    return
                ended = self._ended
            if not in_time:
                raise busy()
            in_time = ended.wait(left())

    def _open(self, closed: list[bool]) -> None:
        if closed:
            self._closed = False


def busy() -> EngineBusyError:
    """What a sleep is refused with where requests are in flight."""
    return EngineBusyError(
        "the engine has requests in flight, and memory that they use cannot be released: wait for "
        "them (wait_idle=True), or abort them (abort=True)"
    )
