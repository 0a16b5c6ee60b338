"""The status of an engine's memory, and the operations that it allows."""

from __future__ import annotations

from enum import Enum

from memsaver.errors import ConfigError, InvalidStateError

from .errors import EngineAsleepError, EngineError
from .tags import GRAPH, KV_CACHE, RELEASE_ORDER, RESUME_ORDER, WEIGHTS

__all__ = ["Status", "check_operation", "status_of"]


class Status(str, Enum):
    """The status of an engine's memory. Each value is the member's name in lower case."""

    AWAKE = "awake"
    WEIGHTS_ONLY = "weights_only"  # no KV cache; with or without graphs
    ASLEEP = "asleep"  # neither weights nor KV cache; with or without graphs
    NO_WEIGHTS = "no_weights"  # has a KV cache; with or without graphs
    NO_GRAPHS = "no_graphs"  # has weights and KV cache
    UNKNOWN = "unknown"  # the status is changing, or has not been reported since an error


# The status for each set of released tags.
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

# The tags that must be mapped for an operation.
_NEEDS = {
    "generate": frozenset(RELEASE_ORDER),
    "update_weights": frozenset({WEIGHTS}),
}


def status_of(released: frozenset[str] | None) -> Status:
    """Return the status of an engine that has released these tags; None means unknown tags.

    Raises:
        EngineError: the engine reports an unknown tag.
    """
    if released is None:
        return Status.UNKNOWN
    if released not in _STATUS:
        unknown = sorted(map(repr, released.difference(RELEASE_ORDER)))
        raise EngineError(
            f"the engine reports {', '.join(unknown)} as released; its tags are "
            f"{', '.join(RELEASE_ORDER)}"
        )
    return _STATUS[released]


def check_operation(operation: str, released: frozenset[str] | None) -> None:
    """Check that an engine can execute an operation.

    Args:
        operation: "generate" or "update_weights".
        released: the engine's released tags; None if they are unknown.

    Raises:
        ConfigError: the operation is unknown.
        EngineAsleepError: a tag that the operation needs is released.
        InvalidStateError: the tags are unknown.
    """
    if not isinstance(operation, str) or operation not in _NEEDS:
        raise ConfigError(f"operation must be one of {', '.join(_NEEDS)}, not {operation!r}")
    if released is None:
        raise InvalidStateError(f"the engine is in an unknown state: it cannot {operation} now")
    missing = [tag for tag in RESUME_ORDER if tag in released & _NEEDS[operation]]
    if missing:
        error = EngineAsleepError(
            f"the engine cannot {operation} while {', '.join(missing)} is released; wake it up "
            "first",
            tag=missing[0],
        )
        error.tags = tuple(tag for tag in RELEASE_ORDER if tag in released)
        raise error
