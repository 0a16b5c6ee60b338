"""Values inside containers: states of optimizers, optimizers inside of others."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["leaves"]

_SEQUENCES = (list, tuple, set, frozenset, deque, UserList)


def leaves(value: Any, what: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the values inside containers, at any depth, each container once.

    Containers are mappings, sequences, sets, deques, dataclasses and SimpleNamespaces. Other
    objects are yielded and not entered. Keys of mappings are not yielded.

    Args:
        value: the outermost container, or a single value.
        what: a name for the value. A value with a key of its own is named by `what` and the
            innermost key: "state 'exp_avg'".
    """
    seen: set[int] = set()
    waiting = [(value, what)]
    while waiting:
        one, name = waiting.pop()
        inside = _inside(one)
        if inside is None:
            yield one, name
        elif id(one) not in seen:
            seen.add(id(one))
            named = [(v, f"{what} {key!r}" if isinstance(key, str) else name) for key, v in inside]
            waiting += reversed(named)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a container; None for other values."""
    if isinstance(value, Mapping | UserDict):
        return list(value.items())
    if isinstance(value, _SEQUENCES):
        return [(None, inner) for inner in value]
    if isinstance(value, SimpleNamespace):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None
