"""Makes the KV cache of models with sliding windows pausable in older versions, such as 0.5.16.

`SWAKVPool` consists of two pools, one for the layers with full attention and one for the layers
with a sliding window. In these versions, `SWAKVPool` builds both pools without a memory saver and
ignores the engine's option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["build", "is_building"]

_is_building: ContextVar[bool] = ContextVar("memsaver_builds_hybrid_pool", default=False)


def build(original: Callable[..., Any], pool: Any, *args: Any, **named: Any) -> Any:
    """Wrap `SWAKVPool.__init__`, so that its pools use an enabled saver if the engine has one.

    The hook does nothing in versions in which the engine passes the option to the pool.
    """
    if "enable_memory_saver" in inspect.signature(original).parameters:
        return original(pool, *args, **named)
    before = _is_building.set(True)
    try:
        return original(pool, *args, **named)
    finally:
        _is_building.reset(before)


def is_building() -> bool:
    """Return whether the caller builds a pool that ignores the engine's option."""
    return _is_building.get()
