"""Values inside containers, such as an optimizer's states or the optimizers in a wrapper."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["leaves"]

_SEQUENCES = (list, tuple, set, frozenset, deque, UserList)


def leaves(value: Any, what: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the values inside containers at any depth; search each container only once.

    Containers are mappings, sequences, sets, deques, dataclasses and SimpleNamespaces. All other
    objects are yielded without being searched. The keys of mappings are not yielded.

    Args:
        value: the outermost container, or a single value.
        what: a name for the value. The name of a value with a key is `what` and the innermost key:
            "state 'exp_avg'".
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
    """Return the keys and values of a container; None for any other value."""
    torch = sys.modules.get("torch")
    whole = () if torch is None else (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
    if isinstance(value, whole):  # even if it is a dataclass or a mapping
        return None
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
