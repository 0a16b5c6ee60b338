"""The ranks of an engine that make collective calls and exchange their results."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memsaver.distributed.attempts import Outcome, Outcomes, Ranks
from memsaver.distributed.channel import Channel
from memsaver.distributed.messages import JSON

from .messages import Failure, RankReport

__all__ = ["Figures", "Group", "first_failure"]


@dataclass(frozen=True)
class Figures:
    """The statistics of one rank's work. `RankReport` describes the fields."""

    seconds: float = 0.0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)


class Group:
    """The ranks of a torch process group with a CPU backend; None stands for a single rank.

    Every wait for the other ranks ends after the group's timeout.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def attempt(self, work: Callable[[], Figures | None]) -> list[RankReport]:
        """Run the work on this rank, and return the reports of all ranks, in rank order.

        The call is collective: every rank of the group makes it, even a rank without work. An
        exception in the work becomes the failure in its rank's report. An interrupt or an exit is
        raised again on its own rank. If the work of all ranks returns None, the ranks exchange
        messages once instead of twice, and their reports contain no host and no process id.

        Raises:
            GroupError: a rank is unreachable.
            RankError: the ranks made different calls.
        """
        mine = RankReport(self.rank, socket.gethostname(), os.getpid())

        def failed(error: BaseException) -> bytes:
            return JSON.pack(asdict(replace(mine, failure=Failure.of(error))))

        # JSON, because unpickling bytes from other processes could execute code.
        codec = replace(JSON, pack_error=failed, unpack_error=JSON.unpack)
        outcomes = self._ranks().attempt(
            "the work of an engine's ranks",
            lambda: None if (found := work()) is None else asdict(replace(mine, **vars(found))),
            codec=codec,
        )
        outcomes.check_agreed()
        return [_report(place, one) for place, one in enumerate(outcomes.each)]

    def collect(
        self,
        work: Callable[[], Mapping[str, Any]],
        failed: Callable[[BaseException], Mapping[str, Any]],
        *,
        uninterrupted: bool = False,
    ) -> list[dict[str, Any]]:
        """Run the work on this rank, and return the fields of all ranks, in rank order.

        Collective. An interrupt or an exit in the work is raised again on its own rank, after the
        other ranks have received its fields.

        Args:
            work: a function that returns this rank's fields, with values that JSON can represent.
            failed: a function that returns the fields of a rank whose work raised the given
                exception.
            uninterrupted: whether signal handlers are deferred during the work.

        Raises:
            GroupError: a rank is unreachable.
            RankError: the ranks made different calls, or the fields of a rank cannot be sent.
        """
        codec = replace(
            JSON, pack_error=lambda error: JSON.pack(failed(error)), unpack_error=JSON.unpack
        )
        # No local variable refers to the outcomes: the traceback of this rank's own exception keeps
        # this frame alive, and the reference cycle would keep the work's tensors alive.
        return _rows(
            self._ranks().attempt(
                "the results of an engine's ranks",
                lambda: dict(work()),
                codec=codec,
                uninterrupted=uninterrupted,
            )
        )

    def gather(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the fields of every rank, in rank order. Collective.

        Args:
            fields: this rank's fields, with values that JSON can represent.

        Raises:
            GroupError: a rank is unreachable.
            RankError: the ranks made different calls, or the fields of a rank cannot be sent.
        """
        outcomes = self._ranks().attempt(
            "the findings of an engine's ranks", lambda: dict(fields), codec=JSON
        )
        return outcomes.values(lambda bad: bad.error(""))

    def barrier(self) -> None:
        """Wait until every rank has made this call.

        Other ranks may instead call a barrier in the engine's own code.
        """
        if self._group is not None and self.size > 1:
            import torch.distributed

            torch.distributed.barrier(self._group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        ranks = self._ranks()
        return ranks.ranks.index(ranks.rank)

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._ranks().ranks)

    def _ranks(self) -> Ranks:
        return Ranks(Channel(self._group) if self._group is not None else None)


def _rows(outcomes: Outcomes[dict[str, Any]]) -> list[dict[str, Any]]:
    outcomes.check_agreed()
    rows = [one.error or one.value for one in outcomes.each]
    if None in rows:
        raise outcomes.error("")
    return [row for row in rows if row is not None]


def _report(place: int, outcome: Outcome[dict[str, Any] | None]) -> RankReport:
    fields = outcome.error or outcome.value
    if fields:
        return RankReport.from_fields(fields)
    failure = outcome.failure
    if failure is None:
        return RankReport(place, "", 0)
    what = Failure(failure.kind, failure.message, failure.tag)
    return RankReport(place, failure.host, 0, failure=what)


def first_failure(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the report of the first rank that failed, or None."""
    return next((rank for rank in ranks if rank.failure is not None), None)
