"""Create rows that compare memsaver with other libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import results
from libraries import OURS, PEERS


def compared(
    metric: str,
    found: Mapping[str, Sequence[float]],
    limit: Sequence[float] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each measured peer if memsaver was also measured. Lower is better."""
    if not found.get(OURS):
        return
    for name, peer in PEERS.items():
        if found.get(name):
            yield results.measurement(metric, found[OURS], peer, found[name], limit)


def show(metric: str, values: Sequence[float]) -> None:
    """Print a metric's values, for example if no peer was measured."""
    print(f"{metric}: {list(values)}")
