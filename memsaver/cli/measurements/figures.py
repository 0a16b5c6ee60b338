"""Figures: measurements, and the limits with which they are compared."""

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
        name: identifies the figure in every version: "pause, host, changed".
        group: the group of the figure: "bus, pinned memory", "no backup", "backup on the host".
        title: the title within the group.
        bytes: the number of bytes of each repetition.
        seconds: the time of each repetition, in order.
        limit: describes the lower bound of the time, or "" if the figure is a limit itself.
        limit_seconds: that bound for `bytes`, from medians; None if the figure is a limit itself.
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
        """The rate at the median time."""
        return self.bytes / max(self.median_seconds, 1e-9)

    @property
    def of_limit_percent(self) -> float | None:
        """The rate as a percentage of the limit's rate; None if there is no limit."""
        if self.limit_seconds is None:
            return None
        return 100 * self.limit_seconds / max(self.median_seconds, 1e-9)


class Limits:
    """Measured times of the bus and the driver, scaled to any number of bytes."""

    def __init__(self, figures: list[Figure]) -> None:
        self._figures = {figure.name: figure for figure in figures}

    def seconds(self, nbytes: int, *names: str) -> float:
        """Return the sum of the times of the named figures, for `nbytes` bytes."""
        rates = [self._figures[name].bytes_per_second for name in names]
        return sum(nbytes / rate for rate in rates)


def seconds_of(action: Callable[[], object]) -> float:
    """Return the duration of a call, in seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
