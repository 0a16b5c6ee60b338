"""Observation of a loader's writes into its model's memory.

The loader runs unchanged inside a torch dispatch mode that intercepts every operation and the
tensors that it writes to. The model's tensors are identified by their storages, and the loader's
input tensors by their addresses, so this code is independent of the model's layout.
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

from memsaver._memory.sharing.importing import is_imported
from memsaver.errors import SharingError

from ..errors import EngineError

__all__ = ["Load", "Named", "Operation", "Source", "Storage", "Writes", "storage_of"]

Named = Sequence[tuple[str, Any]]
Load = Callable[[Iterable[tuple[str, Any]]], Any]
Storage = tuple[Any, int]  # a storage's device and address


@functools.cache
def _mode_class() -> Any:
    """Return the class of a torch dispatch mode that passes each operation to a `Writes`."""
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
    """A torch operation and its arguments."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_copy(self) -> bool:
        """Whether the operation is a plain copy from one tensor to another."""
        return bool(self.function._schema.name == "aten::copy_")

    @property
    def constant(self) -> Any:
        """The number that the operation writes to all elements; None for any other operation."""
        import torch

        if self.function._schema.name == "aten::zero_":
            return 0
        if self.function._schema.name not in ("aten::fill_", "aten::copy_"):
            return None
        value = self.args[1]
        if not isinstance(value, torch.Tensor):
            return value
        return value.item() if value.dim() == 0 and value.device.type == "cpu" else None

    def tensors(self) -> Iterator[Any]:
        """Return the tensors among the arguments."""
        return _tensors_in((self.args, self.kwargs))

    def run(self, instead: Mapping[int, Any] | None = None) -> Any:
        """Run the operation and return its result.

        Args:
            instead: replacements for arguments, by the arguments' ids. In the result, the original
                arguments take the place of their replacements.
        """
        if not instead:
            return self.function(*self.args, **self.kwargs)
        result = self.function(*_replaced(self.args, instead), **_replaced(self.kwargs, instead))
        given = {id(tensor): tensor for tensor in self.tensors()}
        back = {id(other): given[key] for key, other in instead.items()}
        return _replaced(result, back)


class Writes:
    """Observes and performs the writes into a model's memory.

    Attributes:
        source: the loader's input tensors.
    """

    def __init__(self, model: Any, source: Source) -> None:
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.numel()]
        self._storages = set(map(storage_of, tensors))
        self._tensors = {(tensor.data_ptr(), tensor.numel()) for tensor in tensors}
        self.source = source

    def run(self, load: Load) -> Any:
        """Run a loader and return its result.

        Work that the loader submits to thread pools runs on this thread.
        """
        import torch

        with _pools_inline(), torch.no_grad(), _mode_class()(self):
            return load(iter(self.source))

    def call(self, operation: Operation) -> Any:
        """Run one of the loader's operations.

        Raises:
            EngineError: the operation would repeat a tensor to fill a larger part of the model.
            SharingError: the operation would write to the sender's tensors.
        """
        targets = _written(operation)
        written = [t for t in targets if storage_of(t) in self._storages and t.numel()]
        self._protect_sender(t for t in targets if storage_of(t) not in self._storages)
        if not written:
            result = self.read(operation)
            self.source.follow(operation, result)
            return result
        marks = {id(tensor) for tensor in written}
        sources = [tensor for tensor in operation.tensors() if id(tensor) not in marks]
        constant = operation.constant
        is_padding = (
            constant == 0 and not self.source.has_numbers and not any(map(self._is_whole, written))
        )
        names = self.source.writes(sources, constant, is_padding)
        if operation.is_copy:
            self._refuse_repetition(operation.args[0], operation.args[1])
        return self.write(operation, written, names)

    def _is_whole(self, tensor: Any) -> bool:
        """Return whether a tensor covers the memory of a whole parameter or buffer.

        A zero written to a whole parameter or buffer may have been computed from an input tensor.
        """
        return (tensor.data_ptr(), tensor.numel()) in self._tensors

    def _refuse_repetition(self, held: Any, tensor: Any) -> None:
        """Raise `EngineError` if a copy would repeat a dimension of an input tensor.

        Loaders intentionally repeat single elements, such as the scale of a fused weight, and
        tensors that have fewer dimensions than the model's.
        """
        if not 1 < tensor.numel() < held.numel() or tensor.dim() != held.dim():
            return
        names = self.source.shown_by(tensor)
        if names:
            raise EngineError(
                f"the model's loader would repeat {', '.join(names)}, of shape "
                f"{tuple(tensor.shape)}, to fill a target of shape {tuple(held.shape)}: send the "
                "whole tensor"
            )

    def _protect_sender(self, targets: Iterable[Any]) -> None:
        """Raise `SharingError` if an operation would write to the sender's own tensors."""
        for tensor in targets:
            if is_imported(tensor.untyped_storage().data_ptr()):
                names = ", ".join(self.source.views(tensor)) or "a tensor"
                raise SharingError(
                    f"the model's loader writes to {names} in the sender's shareable region: "
                    "send a copy that is outside of all regions"
                )

    def read(self, operation: Operation) -> Any:
        """Run an operation that writes nothing to the model."""
        return operation.run()

    def write(self, operation: Operation, written: list[Any], names: list[str]) -> Any:
        """Run an operation that writes to the model.

        Args:
            operation: the operation.
            written: the arguments in the model's memory to which the operation writes.
            names: the names of the write's source tensors.
        """
        return operation.run()


class Source:
    """A loader's input tensors, which the loader reads one at a time.

    The tensors that operations compute from the input tensors are tracked, because some loaders
    store several inputs and later write one tensor that combines all of them.

    Attributes:
        named: the input tensors with their names, in the loader's order.
        used: the names of the input tensors that were the source of at least one write.
        blurred: whether the source of any write is unknown.
    """

    def __init__(self, named: Named) -> None:
        self.named = named
        self._shapes = {name: tensor.shape for name, tensor in named}
        self._name: str | None = None
        self._places: dict[Any, list[tuple[int, int, str]]] = {}  # by device, sorted
        for name, tensor in named:
            device, begin, end = _span(tensor)
            self._places.setdefault(device, []).append((begin, end, name))
        for places in self._places.values():
            places.sort()
        self._computed: dict[Storage, frozenset[str]] = {}
        self._numbers: dict[Any, frozenset[str]] = {}  # by number: its source tensors
        self.used: set[str] = set()
        self.blurred = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.named:
            self._name = name
            yield name, tensor
        self._name = None

    def writes(self, tensors: Iterable[Any], constant: Any, is_padding: bool) -> list[str]:
        """Return the names of a write's source tensors, and add these names to `used`.

        Args:
            tensors: the tensors that the operation reads.
            constant: see `Operation.constant`.
            is_padding: whether the operation writes zeros that need no source.
        """
        names = list(dict.fromkeys(name for tensor in tensors for name in self._names_of(tensor)))
        if not names and self._name is not None:
            names = [self._name]
        elif not names:
            names = sorted(self._numbers.get(constant, ()))
        self.used.update(names)
        self.blurred |= not names and not is_padding
        return names

    def follow(self, operation: Operation, result: Any) -> None:
        """Record the input tensors from which an operation computed its result."""
        given = list(operation.tensors())
        names = frozenset(name for tensor in given for name in self._names_of(tensor))
        before = {storage_of(tensor) for tensor in given}
        for tensor in _tensors_in(result):
            storage = storage_of(tensor)
            # A different storage object is new, possibly at the address of a freed one.
            earlier = self._computed.get(storage) if storage in before else None
            self._computed[storage] = names | (earlier or frozenset())
        if isinstance(result, int | float) and not isinstance(result, bool):
            self._numbers[result] = names | self._numbers.get(result, frozenset())

    def _names_of(self, tensor: Any) -> Iterable[str]:
        names = self._at(_span(tensor))
        if self._name is not None and self._name in names:
            return [self._name]
        return names or sorted(self._computed.get(storage_of(tensor), ()))

    @property
    def has_numbers(self) -> bool:
        """Whether the loader has read a number from an input tensor."""
        return bool(self._numbers)

    def shown_by(self, tensor: Any) -> list[str]:
        """Return the names of the input tensors whose data a tensor represents.

        The tensor is a view of an input tensor with the same number of dimensions, or was computed
        from exactly one input tensor of the same shape.
        """
        names = [n for n in self.views(tensor) if len(self._shapes[n]) == tensor.dim()]
        computed = self._computed.get(storage_of(tensor), ()) if not names else ()
        if len(computed) == 1:
            names = [n for n in computed if self._shapes[n] == tensor.shape]
        return names

    def views(self, tensor: Any) -> list[str]:
        """Return the names of the input tensors of which a tensor is a view."""
        return self._at(_span(tensor))

    def _at(self, span: tuple[Any, int, int]) -> list[str]:
        """Return the names of the input tensors of which a tensor with this span is a view."""
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
    """Return a tensor's device, and the range of addresses from its first to its last element."""
    if tensor.numel() == 0:
        return tensor.device, 0, 0
    begin = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.device, begin, begin + (last + 1) * tensor.element_size()


# --- tensors --------------------------------------------------------------------------------------


def storage_of(tensor: Any) -> Storage:
    """Return a key that identifies a tensor's storage."""
    return tensor.device, tensor.untyped_storage().data_ptr()


@functools.cache
def _writing_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    return tuple(
        (at, argument.name)
        # A higher-order operator has no schema, and writes through other operations.
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
    """Return the value, with each object whose id is in `by` replaced."""
    from torch.utils import _pytree

    return _pytree.tree_map(lambda leaf: by.get(id(leaf), leaf), value)


# --- threads --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pools_inline() -> Iterator[None]:
    """During the block, run on this thread the work that it submits to thread pools.

    A dispatch mode applies to one thread. The work of other threads is not affected.
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
