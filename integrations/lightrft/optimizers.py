"""The memory of a LightRFT strategy's optimizers, given back between steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import memsaver
import memsaver.distributed
from memsaver.errors import ConfigError
from memsaver.integrations.lightrft.ranks import has_other_ranks, on_every_rank
from memsaver.integrations.trainer import Offloaded, offload
from memsaver.interrupts import collective_block, signals_deferred

__all__ = ["OptimizerMemory"]


class OptimizerMemory:
    """Optimizers, each in a tag of its own. Every rank makes the same calls, from one thread."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        # By optimizer: its tag, from when it is first seen; its handle, on this rank; and those
        # that have one on all ranks. Tags and the last are the same everywhere.
        self._tags: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._handles: weakref.WeakKeyDictionary[Any, Offloaded] = weakref.WeakKeyDictionary()
        self._settled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen = 0

    @signals_deferred()  # no handler may run between the two collectives
    def pause(self, optimizer: Any) -> None:
        """Release an optimizer's memory, on every rank or on none. A second call does nothing.

        Raises:
            RankError: it failed on a rank; the memory is mapped on all ranks.
            ConfigError, MemsaverError: `offload` or `memsaver.pause` raised this; the memory is
                mapped.
        """
        inner, is_wrapped = _inner(optimizer)
        if not self._is_settled(inner):
            on_every_rank(
                "putting the optimizer into a tag",
                lambda: self._put(inner, is_wrapped),
                "on the others it is in the tag, which changes nothing; call it again",
            )
            self._settled.add(inner)
        _pause([self._tags[inner]])

    def resume(self, optimizer: Any) -> None:
        """Map an optimizer's memory again, on every rank or on none. Does nothing if it is mapped.

        Raises:
            RankError: it failed on a rank, for example without enough memory; the memory is paused
                on all ranks.
            MemsaverError: `memsaver.resume` raised this; the memory is paused.
        """
        inner, _ = _inner(optimizer)
        if self._is_settled(inner):
            _resume([self._tags[inner]])

    @collective_block
    def there(self) -> Iterator[None]:
        """Map the memory of all optimizers for the block. Raises as `resume` and `pause` do."""
        tags = sorted(handle.tag for handle in self._handles.values() if _is_paused(handle))
        if tags:
            _resume(tags)
        try:
            yield
        finally:
            if tags:
                _pause(tags)

    def close(self) -> None:
        """Resume all optimizers, and stop moving their new memory. Raises as `resume` does."""
        tags = sorted(handle.tag for handle in self._handles.values() if _is_paused(handle))
        if tags:
            _resume(tags)
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        self._settled.clear()

    def _is_settled(self, inner: Any) -> bool:
        try:
            return inner in self._settled
        except Exception:  # an odd object, which `_put` refuses on all ranks
            return False

    def _put(self, inner: Any, is_wrapped: bool) -> None:
        try:
            is_new = inner not in self._tags
            number = self._seen + is_new
            self._tags.setdefault(inner, self._tag if number == 1 else f"{self._tag} {number}")
            self._seen = number
        except TypeError as error:
            raise ConfigError(
                f"an optimizer of torch's is offloaded, not a {type(inner).__name__}"
            ) from error
        if inner not in self._handles:
            self._handles[inner] = offload(inner, tag=self._tags[inner], parameters=is_wrapped)


def _inner(optimizer: Any) -> tuple[Any, bool]:
    """The optimizer that has the states, and whether a wrapper is around it.

    LightRFT's wrapper for mixed precision has it as `optim`, and gives it master weights of its own
    in place of the model's parameters. Its own hooks, as an optimizer's, are never called.
    """
    inner = optimizer
    while hasattr(getattr(inner, "optim", None), "param_groups"):
        inner = inner.optim
    return inner, inner is not optimizer


def _is_paused(handle: Offloaded) -> bool:
    return handle.state is memsaver.State.PAUSED


def _pause(tags: list[str]) -> None:
    if has_other_ranks():
        memsaver.distributed.pause(*tags)
    else:
        memsaver.pause(*tags)


def _resume(tags: list[str]) -> None:
    if has_other_ranks():
        memsaver.distributed.resume(*tags)
    else:
        memsaver.resume(*tags)
