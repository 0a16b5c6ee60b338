"""Rows of memsaver against the libraries that are its peers."""

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
    """A row for each peer with values, where memsaver has some too. Less is better."""
    if not found.get(OURS):
        return
    for name, peer in PEERS.items():
        if found.get(name):
            yield results.measurement(metric, found[OURS], peer, found[name], limit)


def tell(metric: str, values: Sequence[float]) -> None:
    """Prints what no row holds: memsaver's values where no peer was measured."""
    print(f"{metric}: {list(values)}")
