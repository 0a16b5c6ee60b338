"""What a controller's calls did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memsaver.integrations.sglang.protocol import Answer, RankReport

__all__ = ["SleepReport", "Step", "rank_reports", "timed"]


@dataclass(frozen=True)
class Step:
    """One thing that the engine was asked for.

    Attributes:
        name: "abort", "wait_idle", "flush", "release" or "resume".
        tags: the tags of a release or a resume.
        seconds: from asking to the answer, as the caller saw it.
        ranks: what a release or a resume did on each rank; () where the engine does not tell, as
            without memsaver's plugin.
    """

    name: str
    tags: tuple[str, ...]
    seconds: float
    ranks: tuple[RankReport, ...] = ()

    @property
    def bytes(self) -> int:
        """Device memory given back, or taken, on all ranks."""
        return sum(rank.bytes for rank in self.ranks)


@dataclass(frozen=True)
class SleepReport:
    """What `sleep` or `wake_up` did.

    Attributes:
        steps: in their order.
        skipped: tags that were as asked already.
    """

    steps: tuple[Step, ...]
    skipped: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """How long all steps took."""
        return sum(step.seconds for step in self.steps)

    @property
    def bytes(self) -> int:
        """Device memory given back, or taken, on all ranks."""
        return sum(step.bytes for step in self.steps)

    @property
    def changed(self) -> tuple[str, ...]:
        """The tags that were released or resumed."""
        return tuple(tag for step in self.steps for tag in step.tags)


def rank_reports(answers: Iterable[Answer]) -> tuple[RankReport, ...]:
    """The ranks of all answers, each once: data-parallel schedulers may share a group."""
    ranks = {(rank.host, rank.pid): rank for answer in answers for rank in answer.ranks}
    return tuple(ranks.values())


def timed(name: str, work: Callable[[], None]) -> Step:
    """Time some work, and return it as a step without tags. Exceptions of `work` pass through."""
    started = time.monotonic()
    work()
    return Step(name, (), time.monotonic() - started)
