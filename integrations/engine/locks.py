"""Locks that are acquired within a time limit and released even after an interrupt."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C
from memsaver._runtime.timeouts import seconds_until

from .errors import EngineTimeoutError

__all__ = ["late_generation", "locked"]

_HANDLERS_SECONDS = 0.05  # the longest time for which a wait defers signal handlers


@contextlib.contextmanager
def locked(
    lock: threading.Lock, seconds: float, late: Callable[[], Exception]
) -> Iterator[list[threading.Lock]]:
    """Hold a lock during the block, and pass the lock to the block in a list.

    If the block empties the list, another thread must release the lock.

    Args:
        lock: the lock. Unlike a `Gate`, the lock can be released by another thread.
        seconds: the limit on the wait. Signal handlers run during the wait.
        late: a function that returns the error to raise after the limit.
    """
    deadline = time.monotonic() + seconds
    owned: list[threading.Lock] = []
    try:
        while not _acquired(lock, owned, min(_HANDLERS_SECONDS, seconds_until(deadline))):
            if time.monotonic() >= deadline:
                raise late()
        yield owned
    finally:
        _C.uninterrupted(functools.partial(_release, owned), True)


@signals_deferred()
def _acquired(lock: threading.Lock, owned: list[threading.Lock], seconds: float) -> bool:
    if lock.acquire(timeout=seconds):
        owned.append(lock)
    return bool(owned)


def _release(owned: list[threading.Lock]) -> None:
    for lock in owned:
        lock.release()


def late_generation(seconds: float, more: str = "") -> EngineTimeoutError:
    """Return the error for a call that another thread's generation prevented from starting.

    Args:
        seconds: the duration of the wait.
        more: additional advice for the caller.
    """
    return EngineTimeoutError(
        f"another thread's generation did not end within {seconds:.3g} s, and the engine makes one "
        "generation at a time. If this call is made in an on_pause or on_resume callback, that "
        "thread may be waiting for the callback's tag: make this call after the transition, or "
        f"pass a shorter `timeout`{more}"
    )
