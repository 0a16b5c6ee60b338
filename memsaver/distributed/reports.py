"""Reports of a pause, a resume or a swap on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver._transitions.reports import Report

__all__ = ["GroupReport", "RankFigures"]


@dataclass(frozen=True)
class RankFigures:
    """The statistics of a call on one rank.

    Attributes:
        rank: the rank in the world, not in the group.
        seconds: the duration of the rank's own work, excluding the wait for other ranks.
        bytes: device memory released or mapped; for a swap, the sum of both.
        copied_bytes: bytes copied to or from the backups.
    """

    rank: int
    seconds: float
    bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class GroupReport:
    """The result of a call on this rank, and its statistics on all ranks.

    Attributes:
        local: this rank's report.
        ranks: the statistics of every rank, in the group's order; the same on all ranks.
        seconds: the duration of the call on this rank, including the wait for other ranks.
    """

    local: Report
    ranks: tuple[RankFigures, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        """Device memory released or mapped on all ranks; for a swap, the sum of both."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to or from the backups on all ranks."""
        return sum(rank.copied_bytes for rank in self.ranks)

    @property
    def slowest(self) -> RankFigures:
        """The statistics of the slowest rank, for which the other ranks waited."""
        return max(self.ranks, key=lambda rank: rank.seconds)
