"""`IdleTimer`: the time that an engine has spent without requests."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["IdleTimer"]


class IdleTimer:
    """Measures the time since the last request to an engine that releases its memory when idle.

    Args:
        seconds: the idle time after which the engine should release its memory.
        clock: a function that returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = clock()

    @property
    def left(self) -> float:
        """The remaining seconds; 0 if the engine should release its memory now."""
        return max(0.0, self._since + self._seconds - self._clock())

    def restart(self) -> None:
        """Restart the timer, because a request arrived or the engine cannot release memory now."""
        self._since = self._clock()
