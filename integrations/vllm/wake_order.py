"""Postpone the changes that vLLM's worker makes to the model in a wake-up.

After a sleep at level 2, the worker of vLLM 0.26 restores the model's buffers in the first wake-up,
even if that wake-up does not include the weights. With a quantized KV cache, its V1 model runner
resets the cache's scales to 1 after every wake-up of the KV cache. The buffers and the scales are
in the memory of the weights. If this memory is still released, writing to it crashes the worker
with an illegal access. The scales are also buffers, so their values are restored with the weights
at every level, and a reset is not needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..engine.tags import WEIGHTS
from .allocator import MemsaverAllocator

__all__ = ["in_any_order", "saved"]

_SAVED = "_sleep_"  # the prefix of the worker's attributes for the contents of a sleep
_RESET = "init_fp8_kv_scales"  # a method of the V1 model runner, until 0.28


def in_any_order(
    wake_up: Callable[..., None], allocator_of: Callable[[], MemsaverAllocator | None]
) -> Callable[..., None]:
    """Wrap `wake_up` so that changes to the weights are postponed until the weights are awake."""

    @functools.wraps(wake_up)
    def call(worker: Any, tags: list[str] | None = None) -> None:
        allocator = allocator_of()
        if allocator is None:
            wake_up(worker, tags)
            return
        stay = tags is not None and WEIGHTS not in tags and WEIGHTS in allocator.released
        later = saved(worker) if stay else {}
        with _without_reset(worker.model_runner):
            vars(worker).update({name: type(value)() for name, value in later.items()})
            try:
                wake_up(worker, tags)
            finally:
                vars(worker).update(later)

    return call


def saved(worker: Any) -> dict[str, Any]:
    """Return the attributes in which a worker records a sleep's saved contents or pending work."""
    return {
        name: value
        for name, value in vars(worker).items()
        if name.startswith(_SAVED) and isinstance(value, dict | bool)
    }


@contextlib.contextmanager
def _without_reset(runner: Any) -> Iterator[None]:
    if not hasattr(runner, _RESET):
        yield
        return
    setattr(runner, _RESET, lambda: None)
    try:
        yield
    finally:
        delattr(runner, _RESET)
