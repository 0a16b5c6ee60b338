"""Describes the state after a release or a resume that failed and was undone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..engine.messages import RankReport
from ..engine.tags import WEIGHTS

__all__ = ["lost_tags", "troubles", "what_is_left"]


def troubles(ranks: Sequence[RankReport]) -> str:
    """Describe the failures of all ranks."""
    return "; ".join(
        f"rank {rank.rank} ({rank.host}): {rank.failure.message}"
        for rank in ranks
        if rank.failure is not None
    )


def lost_tags(undone: Sequence[RankReport], weights: bool) -> set[str]:
    """Return the tags whose contents were lost by a release that was undone.

    Args:
        undone: the reports of the resume that undid the release.
        weights: whether the release discarded the contents of the weights.
    """
    moved = {tag for rank in undone for tag, nbytes in rank.device_bytes.items() if nbytes}
    return moved if weights else moved - {WEIGHTS}


def what_is_left(lost: Collection[str]) -> str:
    """Describe the memory after a release that was undone and lost the contents of these tags."""
    if not lost:
        return "every rank has its memory, with its contents"
    return (
        f"every rank has its memory; contents of {', '.join(sorted(lost))} without a backup are "
        "lost on some ranks"
    )
