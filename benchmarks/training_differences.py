"""Judge whether trainings differ only as much as two trainings with one library do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FACTOR = 10  # of the largest difference between two runs of the peer: those of few steps scatter

Steps = Sequence[Mapping[str, Any]]  # the figures of each step


def larger(ours: Steps, theirs: Steps, again: Steps, keys: Sequence[str]) -> list[str]:
    """Return the figures that differ far more than between two trainings with the peer.

    Args:
        ours: the training with memsaver.
        theirs: the training with the peer.
        again: a second training with the peer.
        keys: the names of the figures, which are numbers.
    """
    found = []
    for key in keys:
        mine, usual = largest(ours, theirs, key), largest(theirs, again, key)
        if mine > FACTOR * usual:
            found.append(f"{key} differs by {mine:.4g}, in two runs of the peer by {usual:.4g}")
    return found


def largest(one: Steps, other: Steps, key: str) -> float:
    """Return the largest difference of a figure in the same step of two trainings."""
    pairs = zip(one, other, strict=True)
    return max(abs(float(mine[key]) - float(others[key])) for mine, others in pairs)
