"""The arrivals of ranks at a channel's collectives, which the ranks record in torch's store.

For each rank, a channel's store contains the number of the last collective that the rank reached.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from memsaver._runtime.latches import Latch

__all__ = ["GONE", "arrivals", "missing_ranks"]

# Marks a collective that a rank has abandoned. Used as a suffix of the collective's number, and
# as a key.
GONE = " gave up"

_DIAGNOSIS_SECONDS = 5.0  # time limit for determining the missing ranks
_STRAGGLER_SECONDS = 0.5  # time without an arrival, after which absent ranks are considered missing


def arrivals(store: Any, ranks: list[int], gone: bool = False) -> dict[int, int]:
    """Return the number of collectives that each rank has reached.

    Ranks that have stopped waiting are omitted, unless `gone` is true.
    """
    keys = [str(rank) for rank in ranks]
    # Two requests suffice for all ranks if each rank has arrived at least once.
    known = keys if store.check(keys) else [key for key in keys if store.check([key])]
    many = store.has_extended_api()
    values = store.multi_get(known) if many else [store.get(key) for key in known]
    texts = zip(known, (value.decode() for value in values), strict=True)
    return {
        int(key): int(text.removesuffix(GONE))
        for key, text in texts
        if gone or not text.endswith(GONE)
    }


def missing_ranks(store: Any, own: int, ranks: list[int], collectives: int) -> tuple[int, ...]:
    """Record that this rank has abandoned a collective, and return the ranks that did not reach it.

    Args:
        store: the channel's store.
        own: this rank.
        ranks: the channel's ranks.
        collectives: the number of the collective.

    Returns:
        The missing ranks, or () if the store does not respond.
    """
    late = tuple(ranks)

    def look() -> None:
        nonlocal late
        store.set(str(own), f"{collectives}{GONE}")  # a late rank need not look for this rank
        store.set(GONE, "")
        end = time.monotonic() + _STRAGGLER_SECONDS
        while late and time.monotonic() < end:
            still = _behind(store, ranks, collectives)
            if len(still) < len(late):
                end = time.monotonic() + _STRAGGLER_SECONDS
            late = still
            time.sleep(_STRAGGLER_SECONDS / 10)

    return late if _done_in_time(look) else ()


def _behind(store: Any, ranks: list[int], collectives: int) -> tuple[int, ...]:
    """Return the ranks that have reached fewer collectives than `collectives`."""
    counts = arrivals(store, ranks, gone=True)
    return tuple(rank for rank in ranks if counts.get(rank, 0) < collectives)


def _done_in_time(look: Callable[[], None]) -> bool:
    """Run `look` on a new thread, and return whether it ended within the time limit."""
    done = Latch()

    def run() -> None:
        with contextlib.suppress(Exception):
            look()
            done.open()

    with contextlib.suppress(RuntimeError):  # if no thread can be started, there is no diagnosis
        threading.Thread(target=run, name="memsaver-missing-ranks", daemon=True).start()
        done.wait(_DIAGNOSIS_SECONDS)
    return done.is_open()
