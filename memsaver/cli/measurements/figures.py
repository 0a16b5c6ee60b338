"""What is measured: figures, each with the limit that it can be held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Figure", "Limits", "seconds_of"]


@dataclass(frozen=True)
class Figure:
    """One thing that was done some times.

    Attributes:
        name: the same in every version: "pause, host, changed".
        group: what it belongs to: "bus, pinned memory", "no backup", "backup on the host".
        title: what it is, within its group.
        bytes: how many each time was for.
        seconds: of every time, in order.
        limit: in words what nothing can be faster than, or "" for a limit itself.
        limit_seconds: what that takes for as many bytes, by the medians; None for a limit itself.
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
        """The median of all times."""
        return statistics.median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """By the median."""
        return self.bytes / max(self.median_seconds, 1e-9)

    @property
    def of_limit_percent(self) -> float | None:
        """How much of the limit's speed was reached; None where there is none."""
        if self.limit_seconds is None:
            return None
        return 100 * self.limit_seconds / max(self.median_seconds, 1e-9)


class Limits:
    """What the bus and the driver were measured to take, scaled to any number of bytes."""

    def __init__(self, figures: list[Figure]) -> None:
        self._figures = {figure.name: figure for figure in figures}

    def seconds(self, nbytes: int, *names: str) -> float:
        """Of the figures of these names, one after the other, for so many bytes."""
        rates = [self._figures[name].bytes_per_second for name in names]
        return sum(nbytes / rate for rate in rates)


def seconds_of(action: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
