"""Wake-ups of the KV cache before the weights.

vLLM's worker restores the model's buffers in the first wake-up after a sleep at level 2, whatever
its tags, and its V1 model runner resets the scales of a quantised KV cache after every wake-up of
the KV cache. Both lie in the memory of the weights, which may still be released: without these
hooks, such a wake-up ends the worker with an illegal access.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..engine.tags import KV_CACHE, WEIGHTS
from .allocator import MemsaverAllocator

__all__ = ["in_any_order", "saved"]

_SAVED = "_sleep_"  # begins the names of the worker's attributes for contents of a sleep
_AFTER = "post_kv_cache_wake_up"  # a method of the model runner, until 0.28
_POSTPONED = "_memsaver_postponed"  # an attribute of the worker


def in_any_order(
    wake_up: Callable[..., None], allocator_of: Callable[[], MemsaverAllocator | None]
) -> Callable[..., None]:
    """Return a worker's wake-up that leaves work on the weights to the wake-up of the weights."""

    @functools.wraps(wake_up)
    def call(worker: Any, tags: list[str] | None = None) -> None:
        allocator = allocator_of()
        released = allocator.released if allocator is not None else ()
        if tags is not None and WEIGHTS not in tags and WEIGHTS in released:
            with _without_work_on_weights(worker):
                wake_up(worker, tags)
            return
        wake_up(worker, tags)
        if getattr(worker, _POSTPONED, False):
            setattr(worker, _POSTPONED, False)
            if allocator is not None and KV_CACHE not in allocator.released:
                getattr(worker.model_runner, _AFTER)()

    return call


def saved(worker: Any) -> dict[str, Any]:
    """Return the worker's attributes for the contents of a sleep; True requests work."""
    return {
        name: value
        for name, value in vars(worker).items()
        if name.startswith(_SAVED) and isinstance(value, dict | bool)
    }


@contextlib.contextmanager
def _without_work_on_weights(worker: Any) -> Iterator[None]:
    runner = worker.model_runner
    later = saved(worker)
    vars(worker).update({name: type(value)() for name, value in later.items()})
    postpones = hasattr(runner, _AFTER)
    if postpones:
        setattr(runner, _AFTER, lambda: setattr(worker, _POSTPONED, True))
    try:
        yield
    finally:
        vars(worker).update(later)
        if postpones:
            delattr(runner, _AFTER)
