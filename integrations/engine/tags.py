"""The tags of an engine's memory, and the order in which a sleep and a wake-up process them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from memsaver.errors import ConfigError

__all__ = [
    "GRAPH",
    "KV_CACHE",
    "RELEASE_ORDER",
    "RESUME_ORDER",
    "WEIGHTS",
    "Tags",
    "check_known",
    "selected",
]

KV_CACHE, WEIGHTS, GRAPH = "kv_cache", "weights", "cuda_graph"

RELEASE_ORDER = (KV_CACHE, WEIGHTS, GRAPH)
RESUME_ORDER = (GRAPH, WEIGHTS, KV_CACHE)

Tags: TypeAlias = str | Sequence[str] | None
"""One tag, several tags, or None for all tags."""


def selected(tags: Tags, order: Sequence[str]) -> list[str]:
    """Return the tags that a caller selects, in `order`.

    The result is never empty, because engines interpret () as all tags.

    Raises:
        ConfigError: a tag is unknown, or the list is empty.
    """
    if tags is None:
        return list(order)
    if not isinstance(tags, Iterable):
        raise ConfigError(f"tags must be a name, several names or None, not {type(tags).__name__}")
    names = [tags] if isinstance(tags, str) else list(tags)
    if not names:
        raise ConfigError("the list of tags is empty; None means all of them")
    check_known(names, order)
    return [tag for tag in order if tag in names]


def check_known(names: Iterable[str], order: Sequence[str]) -> None:
    """Raise `ConfigError` if a name is not a tag of an engine."""
    for name in names:
        if name not in order:
            raise ConfigError(f"an engine has no tag {name!r}; its tags are {', '.join(order)}")
