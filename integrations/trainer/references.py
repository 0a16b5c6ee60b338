"""References to Python objects that the garbage collector and local variables reveal."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["TEMPORARY", "arrays_of_numpy", "instances_of", "references_to"]

# The number that sys.getrefcount adds to the references to an element of a list.
_probe = [object()]
TEMPORARY = sys.getrefcount(_probe[0]) - 1

_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CHUNK = 10_000
# References to a frame's copy of its variables if no program refers to it: the frame's, and two in
# `_locals_of`.
_KEPT_BY_FRAME = 3


def instances_of(kind: type, values: Iterable[Any] | None = None) -> list[Any]:
    """Return the instances of a class among values; by default, among all tracked objects."""
    kinds = set(_kinds(kind))
    things = gc.get_objects() if values is None else list(values)
    # There are hundreds of thousands of objects, so no Python code runs for each.
    return list(itertools.compress(things, map(kinds.__contains__, map(type, things))))


def references_to(objects: list[Any]) -> Counter[int]:
    """Count the references to each object from containers (except `objects`) and local variables.

    Returns:
        The counts, by the objects' ids.
    """
    ids = set(map(id, objects))
    found = Counter(id(value) for value in _local_values() if id(value) in ids)
    arguments = tuple(objects)  # Python 3.13 reports it as a referrer
    for holder in gc.get_referrers(*arguments):
        if holder is not objects and holder is not arguments:
            found.update(id(value) for value in gc.get_referents(holder) if id(value) in ids)
    return found


def arrays_of_numpy() -> list[range]:
    """Return the addresses of all numpy arrays that containers and local variables refer to."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    known = gc.get_objects()
    found = {id(array): array for array in instances_of(numpy.ndarray, _local_values())}
    for at in range(0, len(known), _CHUNK):
        values = gc.get_referents(*known[at : at + _CHUNK])
        while values:
            found.update((id(array), array) for array in instances_of(numpy.ndarray, values))
            # The collector does not track dicts and tuples that contain only untracked objects.
            inner = [*instances_of(dict, values), *instances_of(tuple, values)]
            unknown = {id(one): one for one in inner if not gc.is_tracked(one)}
            values = gc.get_referents(*unknown.values())
    return [_addresses(array) for array in found.values() if array.size]


def _addresses(array: Any) -> range:
    start = end = int(array.__array_interface__["data"][0])
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            start += (size - 1) * stride
        else:
            end += (size - 1) * stride
    return range(start, end + array.itemsize)


def _kinds(kind: type) -> Iterator[type]:
    """Yield a class and all classes derived from it."""
    yield kind
    derived: type
    for derived in type.__subclasses__(kind):
        yield from _kinds(derived)


def _local_values() -> Iterator[Any]:
    """Yield the local variables of the functions on all threads' stacks.

    Leaves out generators and coroutines, whose variables the collector reports.
    """
    frame: Any
    for frame in sys._current_frames().values():
        while frame is not None:
            flags = frame.f_code.co_flags
            if flags & inspect.CO_OPTIMIZED and not flags & _RESUMED:
                yield from _locals_of(frame)
            frame = frame.f_back


def _locals_of(frame: Any) -> list[Any]:
    code, variables = frame.f_code, frame.f_locals
    cells = set(code.co_cellvars)
    names = [name for name in code.co_varnames if name not in cells]
    values = [variables[name] for name in names if name in variables]
    # Before Python 3.13 `f_locals` is a copy, which the frame keeps with all its values.
    if sys.version_info < (3, 13) and sys.getrefcount(variables) == _KEPT_BY_FRAME:
        variables.clear()
    return values
