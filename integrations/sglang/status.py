"""What of an engine's memory is there, and what it can be asked for then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from memsaver.errors import ConfigError
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.protocol import GRAPH, KV_CACHE, RELEASE_ORDER, WEIGHTS

__all__ = ["Status", "needs_of", "selected", "status_of"]


class Status(str, Enum):
    """What of an engine's memory is there. Its values are their names in lower case."""

    AWAKE = "awake"
    WEIGHTS_ONLY = "weights_only"  # no KV cache; with graphs or without
    ASLEEP = "asleep"  # neither weights nor KV cache; with graphs or without
    NO_WEIGHTS = "no_weights"  # but a KV cache; with graphs or without
    NO_GRAPHS = "no_graphs"  # but weights and KV cache
    UNKNOWN = "unknown"  # it changes, or the engine did not say since an error


# By what is released.
_STATUS = {
    frozenset[str](): Status.AWAKE,
    frozenset({GRAPH}): Status.NO_GRAPHS,
    frozenset({KV_CACHE}): Status.WEIGHTS_ONLY,
    frozenset({KV_CACHE, GRAPH}): Status.WEIGHTS_ONLY,
    frozenset({WEIGHTS}): Status.NO_WEIGHTS,
    frozenset({WEIGHTS, GRAPH}): Status.NO_WEIGHTS,
    frozenset({WEIGHTS, KV_CACHE}): Status.ASLEEP,
    frozenset({WEIGHTS, KV_CACHE, GRAPH}): Status.ASLEEP,
}

# What must not be released when an engine is asked for this.
_NEEDS = {
    "generate": frozenset(RELEASE_ORDER),
    "update_weights": frozenset({WEIGHTS}),
}


def status_of(released: frozenset[str]) -> Status:
    """Return the status of an engine that has released these tags.

    Raises:
        EngineError: the engine reports a tag that SGLang does not have.
    """
    if released not in _STATUS:
        unknown = sorted(map(repr, released.difference(RELEASE_ORDER)))
        raise EngineError(
            f"the engine reports {', '.join(unknown)} as released; SGLang has "
            f"{', '.join(RELEASE_ORDER)}"
        )
    return _STATUS[released]


def needs_of(operation: str) -> frozenset[str]:
    """The tags that must be there for an operation. ConfigError for one that is not known."""
    if not isinstance(operation, str) or operation not in _NEEDS:
        raise ConfigError(f"{operation!r} is none of {', '.join(_NEEDS)}")
    return _NEEDS[operation]


def selected(tags: str | Sequence[str] | None, order: Sequence[str]) -> list[str]:
    """The tags that a caller means, in `order`. Never none, which SGLang would take as all.

    Raises:
        ConfigError: an unknown tag, or an empty list.
    """
    if tags is None:
        return list(order)
    if not isinstance(tags, Iterable):
        raise ConfigError(f"tags must be a name, several names or None, not {type(tags).__name__}")
    names = [tags] if isinstance(tags, str) else list(tags)
    if not names:
        raise ConfigError("no tag is named; None means all of them")
    for name in names:
        if name not in order:
            raise ConfigError(f"SGLang has no memory called {name!r}; it has {', '.join(order)}")
    return [tag for tag in order if tag in names]
