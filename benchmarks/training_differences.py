"""Determine whether runs differ by more than FACTOR times the peer's own difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# The allowed multiple of the largest difference between the peer's two runs: with few steps, that
# difference varies widely.
FACTOR = 10

Steps = Sequence[Mapping[str, Any]]  # the figures of each step


def larger(ours: Steps, theirs: Steps, again: Steps, keys: Sequence[str]) -> list[str]:
    """Describe each figure that differs by more than FACTOR times the peer's own difference.

    Args:
        ours: the run with memsaver.
        theirs: the run with the peer.
        again: a second run with the peer.
        keys: the names of the figures to compare, which must be numbers.
    """
    found = []
    for key in keys:
        mine, usual = largest(ours, theirs, key), largest(theirs, again, key)
        if not mine <= FACTOR * usual:  # also if one of them is not a number
            found.append(f"{key} differs by {mine:.4g}, in two runs of the peer by {usual:.4g}")
    return found


def largest(one: Steps, other: Steps, key: str) -> float:
    """Return the largest difference in `key` between the same steps of two runs, or NaN."""
    pairs = zip(one, other, strict=True)
    found = [abs(float(mine[key]) - float(others[key])) for mine, others in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)
