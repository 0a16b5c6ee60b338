"""`Requests`: counts a controller's requests in flight, and blocks new ones before a sleep."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from memsaver._runtime.latches import Latch, Mutex
from memsaver._runtime.native import _C

from .errors import EngineBusyError

__all__ = ["Requests", "busy"]


class Requests:
    """A counter of requests in flight that rejects new requests while it is closed. Any thread."""

    def __init__(self) -> None:
        self._lock = Mutex()  # protects the attributes below; never owned during a wait
        self._in_flight = 0
        self._closed = False
        self._ended = Latch()  # opened and replaced at the end of each request

    @property
    def closed(self) -> bool:
        """Whether new requests are rejected."""
        return self._closed

    @contextlib.contextmanager
    def one(self, check: Callable[[], None]) -> Iterator[None]:
        """Count the block as a request in flight, unless `check` raises an error."""
        counted: list[bool] = []
        count_down = functools.partial(self._count_down, counted)
        try:
            with self._lock.locked():
                check()
                self._in_flight += 1
                counted.append(True)
            yield
        finally:
            _C.uninterrupted(count_down, True)

    def _count_down(self, counted: list[bool]) -> None:
        with self._lock.locked():
            if counted:
                self._in_flight -= 1
                ended, self._ended = self._ended, Latch()
                ended.open()

    @contextlib.contextmanager
    def none(
        self, wait: bool, hurry: Callable[[], None], left: Callable[[], float]
    ) -> Iterator[None]:
        """Reject new requests during the block, which starts once no request is in flight.

        Args:
            wait: whether to wait for requests in flight, instead of raising an error.
            hurry: a function that is called before the wait, and may end the requests.
            left: a function that returns the remaining seconds of the wait.

        Raises:
            EngineBusyError: requests are in flight or, with `wait`, are still in flight after the
                timeout.
        """
        closed: list[bool] = []
        open_again = functools.partial(self._open, closed)
        try:
            with self._lock.locked():
                if self._in_flight and not wait:
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
            with self._lock.locked():
                if not self._in_flight:
                    return
                ended = self._ended
            if not in_time:
                raise busy()
            in_time = ended.wait(left())

    def _open(self, closed: list[bool]) -> None:
        if closed:
            self._closed = False


def busy() -> EngineBusyError:
    """Return the error for a sleep that is rejected because requests are in flight."""
    return EngineBusyError(
        "the engine has requests in flight, and memory that they use cannot be released: wait for "
        "the requests (wait_idle=True), or abort them (abort=True)"
    )
