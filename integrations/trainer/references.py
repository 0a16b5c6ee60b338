"""References to Python objects, found through the garbage collector and local variables."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memsaver._runtime.native import _C

__all__ = ["TEMPORARY", "buffers_in_use", "instances_of", "references_to"]

# The number of temporary references that sys.getrefcount counts for an element of a list.
_probe = [object()]
TEMPORARY = sys.getrefcount(_probe[0]) - 1

_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CHUNK = 10_000
# The types whose objects export memory to torch, by module. Most are in the standard library.
_BUFFERS = {
    "array": ("array",),
    "builtins": ("bytearray", "memoryview"),
    "ctypes": ("Array", "Structure"),
    "mmap": ("mmap",),
    "numpy": ("ndarray",),
}
# References from memoryviews are ignored, because torch may be the view's only user. If another
# object refers to a view, the view is found through that object.
_VIEWS = {memoryview, type(gc.get_referents(memoryview(b""))[0])}


def instances_of(kind: type) -> list[Any]:
    """Return the instances of a class among all tracked objects."""
    return _instances_of_any([kind], gc.get_objects())


def references_to(objects: list[Any]) -> Counter[int]:
    """Count the references to each object from containers (except `objects`) and local variables.

    Returns:
        The number of references to each object, by the object's id.
    """
    ids = set(map(id, objects))
    found = Counter(id(value) for value in _local_values() if id(value) in ids)
    arguments = tuple(objects)  # Python 3.13 reports it as a referrer
    for holder in gc.get_referrers(*arguments):
        if holder is not objects and holder is not arguments:
            found.update(id(value) for value in gc.get_referents(holder) if id(value) in ids)
    return found


def buffers_in_use() -> list[tuple[range, str]]:
    """Find numpy arrays and writable buffers to which containers and local variables refer.

    Buffers are standard library objects whose memory torch can use: bytearrays, memoryviews,
    `array.array`s, memory maps, and arrays and structures of ctypes.

    Returns:
        The addresses of each array or buffer, and its name for messages, such as "buffer of type
        bytearray".
    """
    kinds = [
        getattr(sys.modules[module], name)
        for module, names in _BUFFERS.items()
        if module in sys.modules
        for name in names
    ]
    known = [one for one in gc.get_objects() if type(one) not in _VIEWS]
    found = {id(one): one for one in _instances_of_any(kinds, [*_local_values()])}
    for at in range(0, len(known), _CHUNK):
        values = gc.get_referents(*known[at : at + _CHUNK])
        while values:
            found.update((id(one), one) for one in _instances_of_any(kinds, values))
            # The collector does not track dicts and tuples that contain only untracked objects.
            inner = _instances_of_any([dict, tuple], values)
            unknown = {id(one): one for one in inner if not gc.is_tracked(one)}
            values = gc.get_referents(*unknown.values())
    addresses = ((_addresses(one), _name_of(one)) for one in found.values())
    return [(place, name) for place, name in addresses if place]


def _name_of(buffer: Any) -> str:
    return "numpy array" if _is_array(buffer) else f"buffer of type {type(buffer).__name__}"


def _is_array(buffer: Any) -> bool:
    return hasattr(buffer, "__array_interface__")


def _addresses(buffer: Any) -> range:
    """Return the address range of an array or a buffer, which is empty for read-only memory."""
    if _is_array(buffer):
        return _addresses_of_array(buffer)
    try:
        with memoryview(buffer) as view:
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            return range(start, start + view.nbytes)
    except (BufferError, TypeError, ValueError):  # closed, empty, not contiguous, or read-only
        with contextlib.suppress(ValueError):
            if isinstance(buffer, memoryview) and buffer.obj is not None:
                return _addresses(buffer.obj)
        return range(0)


def _addresses_of_array(array: Any) -> range:
    start = end = int(array.__array_interface__["data"][0])
    for size, stride in zip(array.shape, array.strides, strict=True):
        if not size:
            return range(0)
        if stride < 0:
            start += (size - 1) * stride
        else:
            end += (size - 1) * stride
    return range(start, end + array.itemsize)


def _instances_of_any(kinds: list[type], values: list[Any]) -> list[Any]:
    types = {derived for kind in kinds for derived in _kinds(kind)}
    # There are hundreds of thousands of objects, so no Python code runs per object.
    return list(itertools.compress(values, map(types.__contains__, map(type, values))))


def _kinds(kind: type) -> Iterator[type]:
    """Yield a class and all classes derived from it."""
    yield kind
    derived: type
    for derived in type.__subclasses__(kind):
        yield from _kinds(derived)


def _local_values() -> Iterator[Any]:
    """Yield the local variables of the functions on all threads' stacks.

    Generators and coroutines are omitted, because the garbage collector reports their variables.
    """
    frame: FrameType | None
    for thread, frame in sys._current_frames().items():
        while frame is not None:
            flags = frame.f_code.co_flags
            if flags & inspect.CO_OPTIMIZED and not flags & _RESUMED:
                yield from _locals_of(frame)
                if sys.version_info < (3, 13):  # `f_locals` is a copy, which the frame keeps
                    _C.empty_copy_of_variables(thread, frame)
            frame = frame.f_back


def _locals_of(frame: FrameType) -> list[Any]:
    code, variables = frame.f_code, frame.f_locals
    cells = set(code.co_cellvars)
    names = [name for name in code.co_varnames if name not in cells]
    return [variables[name] for name in names if name in variables]
