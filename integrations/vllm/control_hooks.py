"""Hooks in the methods that `AsyncLLM` and `LLMEngine` share, except generation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .calls import CHANGES, check_level, need_of

__all__ = ["ControlHooks"]


class ControlHooks:
    """Wrappers of an engine's methods. The wrapped methods of an `AsyncLLM` return awaitables.

    Args:
        change: the function that makes calls that release or resume memory; `level` and `woken`
            describe the call.
        call: the function that makes queries, for which the need is None, and calls that may need
            released memory.
    """

    def __init__(self, change: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._change, self._call = change, call

    def sleep(
        self, original: Callable[..., Any], engine: Any, level: int = 1, mode: str = "abort"
    ) -> Any:
        """Wrap `sleep`. Raises `ConfigError` for an unsupported level."""
        check_level(level)
        return self._change(engine, lambda: original(engine, level, mode), level=level)

    def wake_up(
        self, original: Callable[..., Any], engine: Any, tags: list[str] | None = None
    ) -> Any:
        """Wrap `wake_up`."""
        return self._change(engine, lambda: original(engine, tags), woken=tags)

    def release_kv_cache(self, original: Callable[..., Any], engine: Any) -> Any:
        """Wrap `release_kv_cache_memory`."""
        return self._change(engine, lambda: original(engine))

    def collective_rpc(
        self, original: Callable[..., Any], engine: Any, method: Any, *args: Any, **named: Any
    ) -> Any:
        """Wrap `collective_rpc`, which weight updates also use."""
        work = functools.partial(original, engine, method, *args, **named)
        if method in CHANGES:
            return self._change(engine, work)
        return self._call(engine, need_of(method), work)

    def utility(self, name: str) -> Callable[..., Any]:
        """Return the hook for a method with the same name as its call to the engine core."""

        def hook(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
            return self._call(engine, need_of(name), lambda: original(engine, *args, **named))

        return hook
