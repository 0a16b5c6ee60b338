"""Releases the memory of a LightRFT strategy's optimizers between steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import memsaver
import memsaver.distributed
from memsaver._runtime.interrupts import collective_block, signals_deferred
from memsaver.errors import ConfigError

from ..trainer import Offloaded, offload
from .ranks import has_other_ranks, on_every_rank

__all__ = ["OptimizerMemory"]


class OptimizerMemory:
    """Optimizers, each in its own tag. Every rank makes the same calls, from one thread."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        # Each optimizer's tag, assigned when it is first seen, and its handle on this rank; then
        # the optimizers that have a handle on all ranks. Only the handles may differ among ranks.
        self._tags: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._handles: weakref.WeakKeyDictionary[Any, Offloaded] = weakref.WeakKeyDictionary()
        self._settled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen = 0

    @signals_deferred()  # no handler may run between the two collectives
    def pause(self, optimizer: Any) -> None:
        """Release an optimizer's memory, on every rank or on none. A second call does nothing.

        Raises:
            RankError: the pause failed on a rank; the memory is mapped on all ranks.
            ConfigError, MemsaverError: `offload` or `memsaver.pause` raised this error; the memory
                is mapped.
        """
        inner, is_wrapped = _inner(optimizer)
        if not self._is_settled(inner):
            on_every_rank(
                "putting the optimizer into a tag",
                lambda: self._put(inner, is_wrapped),
                "on the other ranks it is in the tag, with unchanged contents; repeat the call",
            )
            self._settled.add(inner)
        _transitions().pause(self._tags[inner])

    def resume(self, optimizer: Any) -> None:
        """Map an optimizer's memory again, on every rank or on none.

        Does nothing if the memory is mapped.

        Raises:
            RankError: the resume failed on a rank, for example for lack of memory; the memory is
                paused on all ranks.
            MemsaverError: `memsaver.resume` raised this error; the memory is paused.
        """
        inner, _ = _inner(optimizer)
        if self._is_settled(inner):
            _transitions().resume(self._tags[inner])

    @collective_block
    def there(self) -> Iterator[None]:
        """Map the memory of all optimizers during the block.

        Raises the errors of `resume` and `pause`.
        """
        tags = sorted(handle.tag for handle in self._handles.values() if _is_paused(handle))
        if tags:
            _transitions().resume(*tags)
        try:
            yield
        finally:
            if tags:
                _transitions().pause(*tags)

    def close(self) -> None:
        """Resume all optimizers, and stop moving new memory into tags. Raises `resume`'s errors."""
        tags = sorted(handle.tag for handle in self._handles.values() if _is_paused(handle))
        if tags:
            _transitions().resume(*tags)
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        self._settled.clear()

    def _is_settled(self, inner: Any) -> bool:
        try:
            return inner in self._settled
        except Exception:  # raised for an unsuitable object, which `_put` rejects on all ranks
            return False

    def _put(self, inner: Any, is_wrapped: bool) -> None:
        try:
            is_new = inner not in self._tags
            number = self._seen + is_new
            self._tags.setdefault(inner, self._tag if number == 1 else f"{self._tag} {number}")
            self._seen = number
        except TypeError as error:
            raise ConfigError(
                f"only torch optimizers can be offloaded, not a {type(inner).__name__}"
            ) from error
        if inner not in self._handles:
            self._handles[inner] = offload(inner, tag=self._tags[inner], parameters=is_wrapped)


def _inner(optimizer: Any) -> tuple[Any, bool]:
    """Return the optimizer that owns the states, and whether it is wrapped.

    LightRFT's mixed-precision wrapper stores the optimizer in its attribute `optim`. This optimizer
    updates master weights instead of the model's parameters. The wrapper's own optimizer hooks are
    never called.
    """
    inner = optimizer
    while hasattr(getattr(inner, "optim", None), "param_groups"):
        inner = inner.optim
    return inner, inner is not optimizer


def _is_paused(handle: Offloaded) -> bool:
    return handle.state == "paused"


def _transitions() -> Any:
    """Return the module whose `pause` and `resume` act on every rank."""
    return memsaver.distributed if has_other_ranks() else memsaver
