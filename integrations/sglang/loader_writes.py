"""A model's loader, run so that its writes into the model's memory are seen.

A loader is run as it is; a dispatch mode of torch's sees every operation and the tensors that it
writes to. Those of the model are known by their storages, and the tensors that were given to the
loader by their addresses, so that nothing here depends on a model's layout.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Load", "Named", "Operation", "Source", "Storage", "Writes", "storage_of"]

Named = Sequence[tuple[str, Any]]
Load = Callable[[Iterable[tuple[str, Any]]], Any]
Storage = tuple[Any, int]  # its device and address


@functools.cache
def _mode_class() -> Any:
    """A dispatch mode that asks its owner. Made when torch is there, as it is torch's subclass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, owner: Writes) -> None:
            super().__init__()
            self._owner = owner

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return self._owner.call(Operation(function, args, kwargs or {}))

    return Mode


@dataclass(frozen=True)
class Operation:
    """An operation of torch's and its arguments."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_copy(self) -> bool:
        """Whether it is a plain copy from one tensor to another."""
        return bool(self.function._schema.name == "aten::copy_")

    def tensors(self) -> Iterator[Any]:
        """Return the tensors among the arguments."""
        return _tensors_in((self.args, self.kwargs))

    def run(self, instead: Mapping[int, Any] | None = None) -> Any:
        """Run the operation and return its result.

        Args:
            instead: by id of an argument, a tensor that the operation gets in its place. In the
                result the argument stands again.
        """
        if not instead:
            return self.function(*self.args, **self.kwargs)
        result = self.function(*_replaced(self.args, instead), **_replaced(self.kwargs, instead))
        given = {id(tensor): tensor for tensor in self.tensors()}
        back = {id(other): given[key] for key, other in instead.items()}
        return _replaced(result, back)


class Writes:
    """Sees what is written into a model's memory, and lets it be written.

    Attributes:
        source: the tensors that are given to the loader.
    """

    def __init__(self, model: Any, source: Source) -> None:
        self._storages = set(_storages_of(model))
        self.source = source

    def run(self, load: Load) -> Any:
        """Run a loader and return its result. What it hands to a pool of threads runs here."""
        import torch

        with _pools_inline(), torch.no_grad(), _mode_class()(self):
            return load(iter(self.source))

    def call(self, operation: Operation) -> Any:
        """Run an operation of torch's that the loader asks for."""
        written = [t for t in _written(operation) if storage_of(t) in self._storages]
        if not written:
            return self.read(operation)
        marks = {id(tensor) for tensor in written}
        sources = [tensor for tensor in operation.tensors() if id(tensor) not in marks]
        return self.write(operation, written, self.source.writes(sources))

    def read(self, operation: Operation) -> Any:
        """Run an operation that writes nothing to the model."""
        return operation.run()

    def write(self, operation: Operation, written: list[Any], names: list[str]) -> Any:
        """Run an operation that writes to these tensors of the model's.

        Args:
            operation: the operation.
            written: the arguments that lie in the model's memory and are written to.
            names: the tensors that were given to the loader and that this is written from.
        """
        return operation.run()


class Source:
    """Tensors that are given to a loader one by one, and which of them it is at.

    Attributes:
        used: the names of which something was written.
        blurred: whether something was written that no name is known of.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self._name: str | None = None
        self._places: dict[Any, list[tuple[int, int, str]]] = {}  # by device, sorted
        for name, tensor in named:
            device, begin, end = _span(tensor)
            self._places.setdefault(device, []).append((begin, end, name))
        for places in self._places.values():
            places.sort()
        self.used: set[str] = set()
        self.blurred = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._named:
            self._name = name
            yield name, tensor
        self._name = None

    def writes(self, tensors: Iterable[Any]) -> list[str]:
        """The names of what is being written, of which these are arguments; notes them as used."""
        names = [name for tensor in tensors for name in self._at(_span(tensor))]
        if self._name is not None and (not names or self._name in names):
            names = [self._name]
        self.used.update(names)
        self.blurred |= not names
        return names

    def _at(self, span: tuple[Any, int, int]) -> list[str]:
        """The tensors that a span is a part of, by its address: views of them, not copies."""
        device, begin, end = span
        places = self._places.get(device, [])
        at = bisect.bisect_right(places, begin, key=lambda place: place[0])
        # Tied tensors begin at the same address.
        nearest = places[at - 1][0] if at else None
        found = []
        while at and begin < end and places[at - 1][0] == nearest:
            at -= 1
            if end <= places[at][1]:
                found.append(places[at][2])
        return found


def _span(tensor: Any) -> tuple[Any, int, int]:
    """The device and the addresses from a tensor's first element to its last one."""
    if tensor.numel() == 0:
        return tensor.device, 0, 0
    begin = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.device, begin, begin + (last + 1) * tensor.element_size()


# --- tensors --------------------------------------------------------------------------------------


def _storages_of(model: Any) -> Iterator[Storage]:
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            if tensor.numel():
                yield storage_of(tensor)


def storage_of(tensor: Any) -> Storage:
    """Return what tells a tensor's storage from all others."""
    return tensor.device, tensor.untyped_storage().data_ptr()


@functools.cache
def _writing_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to: their places and names."""
    return tuple(
        (at, argument.name)
        # An operator of higher order has no schema, and writes by others.
        for at, argument in enumerate(getattr(getattr(function, "_schema", None), "arguments", ()))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(operation: Operation) -> list[Any]:
    args, kwargs = operation.args, operation.kwargs
    return [
        tensor
        for at, name in _writing_arguments(operation.function)
        for tensor in _tensors_in(args[at] if at < len(args) else kwargs.get(name))
    ]


def _tensors_in(value: Any) -> Iterator[Any]:
    """Return the tensors in nested containers."""
    import torch
    from torch.utils import _pytree

    return (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _replaced(value: Any, by: Mapping[int, Any]) -> Any:
    """The value with other tensors in place of those whose ids are keys."""
    from torch.utils import _pytree

    return _pytree.tree_map(lambda leaf: by.get(id(leaf), leaf), value)


# --- threads --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pools_inline() -> Iterator[None]:
    """For the block, what this thread hands to a pool of threads is done by this thread, at once.

    A dispatch mode belongs to a thread. Other threads' pools work as ever.
    """
    pool = concurrent.futures.ThreadPoolExecutor
    submit: Any = pool.submit
    here = threading.get_ident()

    @functools.wraps(submit)
    def inline(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return submit(self, function, *args, **kwargs)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    pool.submit = inline  # type: ignore[method-assign]
    try:
        yield
    finally:
        pool.submit = submit  # type: ignore[method-assign]
