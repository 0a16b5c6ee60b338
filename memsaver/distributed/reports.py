"""What a pause, a resume or a swap of all ranks did."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver.reports import Report

__all__ = ["GroupReport", "RankFigures"]


@dataclass(frozen=True)
class RankFigures:
    """What the call did on one rank.

    Attributes:
        rank: the rank in the world, not in the group.
        seconds: how long the rank's own part took, without waiting for others.
        bytes: device memory given back, or taken; of a swap, both.
        copied_bytes: bytes moved to the backups, or from them.
    """

    rank: int
    seconds: float
    bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class GroupReport:
    """What the call did on this rank, and in figures on all of them.

    Attributes:
        local: this rank's report.
        ranks: every rank of the group, in the group's order; the same on all of them.
        seconds: how long the call took here, waiting for the other ranks included.
    """

    local: Report
    ranks: tuple[RankFigures, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        """Device memory given back, or taken, on all ranks; of a swap, both."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def copied_bytes(self) -> int:
        """Bytes moved to the backups, or from them, on all ranks."""
        return sum(rank.copied_bytes for rank in self.ranks)

    @property
    def slowest(self) -> RankFigures:
        """The rank that the others waited for."""
        return max(self.ranks, key=lambda rank: rank.seconds)
