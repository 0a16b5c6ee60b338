"""The reports of a controller's calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .messages import Answer, RankReport

__all__ = ["SleepReport", "Step", "rank_reports", "timed"]


@dataclass(frozen=True)
class Step:
    """One request to the engine.

    Attributes:
        name: "abort", "wait_idle", "flush", "release" or "resume".
        tags: the tags of a release or a resume.
        seconds: the time from the request to the answer, as measured by the caller.
        ranks: the ranks' reports of a release or a resume; () if the engine sends no reports, for
            example if it lacks memsaver's plugin.
    """

    name: str
    tags: tuple[str, ...]
    seconds: float
    ranks: tuple[RankReport, ...] = ()

    @property
    def bytes(self) -> int:
        """The device memory that was released or mapped on all ranks."""
        return sum(rank.bytes for rank in self.ranks)


@dataclass(frozen=True)
class SleepReport:
    """The report of a `sleep` or a `wake_up`.

    Attributes:
        steps: the requests to the engine, in order.
        skipped: the tags that were already in the requested state.
    """

    steps: tuple[Step, ...]
    skipped: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The total duration of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def bytes(self) -> int:
        """The device memory that was released or mapped on all ranks."""
        return sum(step.bytes for step in self.steps)

    @property
    def held(self) -> dict[str, int]:
        """The device memory in use on all ranks after a release of all memory, by owner.

        The keys are the same as in `RankReport.held`. The result is empty after any other
        operation.
        """
        totals: Counter[str] = Counter()
        for step in self.steps:
            for rank in step.ranks:
                totals.update(rank.held)
        return dict(totals)

    @property
    def changed(self) -> tuple[str, ...]:
        """The tags that were released or resumed."""
        return tuple(tag for step in self.steps for tag in step.tags)


def rank_reports(answers: Iterable[Answer]) -> tuple[RankReport, ...]:
    """Return the reports in all answers, with one report for each rank.

    Data-parallel schedulers may share ranks.

    Reports without a process id are distinguished by their position in an answer.
    """
    ranks: dict[tuple[object, ...], RankReport] = {}
    for number, answer in enumerate(answers):
        for rank in answer.ranks:
            ranks[(rank.host, rank.pid) if rank.pid else (number, rank.rank, None)] = rank
    return tuple(ranks.values())


def timed(name: str, work: Callable[[], None]) -> Step:
    """Run and time the work, and return a step without tags. Exceptions of `work` propagate."""
    started = time.monotonic()
    work()
    return Step(name, (), time.monotonic() - started)
