"""Compares the arguments that different ranks pass to a collective call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memsaver.distributed.errors import ranks_text
from memsaver.errors import ConfigError

__all__ = ["check_equal"]


def check_equal(ranks: Sequence[int], everyones: Sequence[Mapping[str, str]]) -> None:
    """Raise the same `ConfigError` on all ranks if two ranks pass different arguments.

    Args:
        ranks: the ranks, in the order of `everyones`.
        everyones: for each rank, its arguments by name, formatted for an error message.
    """
    for name in everyones[0]:
        by_value: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, everyones, strict=True):
            by_value.setdefault(theirs[name], []).append(rank)
        if len(by_value) > 1:
            texts = [f"{value} on {ranks_text(same)}" for value, same in by_value.items()]
            raise ConfigError(f"{name} must be equal on all ranks: it is {', '.join(texts)}")
