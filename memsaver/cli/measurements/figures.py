"""Figures, which are measurements and the limits with which they are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Figure", "Limits", "seconds_of"]


@dataclass(frozen=True)
class Figure:
    """A measurement of one action, repeated several times.

    Attributes:
        name: the name of the figure, which is the same in every version, such as "pause, host,
            changed".
        group: the group of the figure, such as "bus, pinned memory", "no backup" or "backup on the
            host".
        title: the title within the group.
        bytes: the number of bytes that each repetition processes.
        seconds: the time of each repetition, in order.
        limit: a description of the lower bound of the time, or "" if the figure is itself a limit.
        limit_seconds: the lower bound for `bytes` bytes, computed from medians; None if there is no
            lower bound.
    """

    name: str
    group: str
    title: str
    bytes: int
    seconds: tuple[float, ...]
    limit: str = ""
    limit_seconds: float | None = None

    @property
    def median_seconds(self) -> float:
        """The median time."""
        return statistics.median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """The rate at the median time, in bytes per second."""
        return self.bytes / max(self.median_seconds, 1e-9)

    @property
    def of_limit_percent(self) -> float | None:
        """The rate as a percentage of the limit's rate, or None if there is no limit."""
        if self.limit_seconds is None:
            return None
        return 100 * self.limit_seconds / max(self.median_seconds, 1e-9)


class Limits:
    """Measured times of the bus and the driver, scaled to any number of bytes."""

    def __init__(self, figures: list[Figure]) -> None:
        self._figures = {figure.name: figure for figure in figures}

    def seconds(self, nbytes: int, *names: str) -> float:
        """Return the total time of the named figures, for `nbytes` bytes."""
        rates = [self._figures[name].bytes_per_second for name in names]
        return sum(nbytes / rate for rate in rates)


def seconds_of(action: Callable[[], object]) -> float:
    """Return the duration of a function call, in seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
