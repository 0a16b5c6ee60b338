"""The requests that go by one controller: counted, and kept out while the engine sleeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from memsaver.integrations.sglang.errors import EngineBusyError

__all__ = ["Requests", "busy"]


class Requests:
    """Counts requests, and lets none begin while it is closed. Any thread."""

    def __init__(self) -> None:
        self._change = threading.Condition()  # of what follows; nothing waits for an engine in it
        self._under_way = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether no request may begin now."""
        return self._closed

    @contextlib.contextmanager
    def one(self, check: Callable[[], None]) -> Iterator[None]:
        """For the block, a request is under way. What `check` raises keeps it from beginning."""
        with self._change:
            check()
            self._under_way += 1
        try:
            yield
        finally:
            with self._change:
                self._under_way -= 1
                self._change.notify_all()

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
        with self._change:
            if self._under_way and not wait:
                raise busy()
            self._closed = True
        try:
            hurry()
            with self._change:
                done = self._change.wait_for(lambda: not self._under_way, left())
            if not done:
                raise busy()
            yield
        finally:
            with self._change:
                self._closed = False


def busy() -> EngineBusyError:
    """What a sleep is refused with where requests are in flight."""
    return EngineBusyError(
        "the engine has requests in flight, and memory that they use cannot be released: wait for "
        "them (wait_idle=True), or abort them (abort=True)"
    )
