"""What a model holds, compared with what it was given, in whatever layout the model has.

Models fuse, shard, transpose and cast what they load, each in its own way. So nothing here knows of
layouts: the model's own loader is run once more on the same tensors, and where it would write into
the model's memory, what it would write is compared, bit for bit, with what is there. Nothing is
written. Comparing takes little memory: `_PIECE_BYTES` at a time, plus what the loader itself makes.

What a loader writes elsewhere, such as attributes that are neither parameters nor buffers, is
written again as in any load, and not compared.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

__all__ = ["Load", "Named", "differing", "watched"]

Named = Sequence[tuple[str, Any]]
Load = Callable[[Iterable[tuple[str, Any]]], Any]

_PIECE_BYTES = 64 << 20
_SOME = "?"  # the name of a tensor that is not known


def watched(model: Any, named: Named, load: Load) -> tuple[Any, tuple[str, ...]]:
    """Load, and see which of the tensors nothing of the model's memory was written from.

    A loader may hand its copies to a pool of threads; they are made by this thread then.

    Args:
        model: a `torch.nn.Module`.
        named: names and tensors.
        load: the model's loader. What it raises passes through.

    Returns:
        What the loader returned, and the names. None of them where the loader takes all tensors
        before it writes the first and copies them on the way, so that it cannot be told.
    """
    source = _Source(named)
    result = _run(load, source, _Writes(model, source))
    unknown = source.blurred
    return result, () if unknown else tuple(n for n, _ in named if n not in source.used)


def differing(model: Any, named: Named, load: Load) -> tuple[str, ...]:
    """The names of the tensors of which the model holds something else than `load` would write.

    Waits for the device.

    Args:
        model: as of `watched`, likewise the rest.
        named: see there.
        load: see there.

    Raises:
        RuntimeError: some seem to differ, which it names, and it could not be made sure.
    """
    quick = _Flags()
    source = _Source(named)
    _run(load, source, _Comparison(model, source, quick))
    suspects = set(quick.names())
    if not suspects:
        return ()
    # What was written twice differs from the first of the two: only the last write of each place
    # counts, which takes a mask of the parameters.
    exact = _Masks()
    source = _Source(named)
    try:
        _run(load, source, _Comparison(model, source, exact))
        names = set(exact.names())
    except Exception as error:
        raise RuntimeError(
            f"{', '.join(sorted(suspects))} may differ, and a closer look failed "
            f"({type(error).__name__}: {error})"
        ) from error
    # Where it is not known which one it is of, it may be of any.
    return tuple(name for name, _ in named if name in names or names == {_SOME})


# --- where a write comes from ---------------------------------------------------------------------


class _Source:
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


# --- what is written ------------------------------------------------------------------------------


@functools.cache
def _mode_class() -> Any:
    """A dispatch mode that asks its owner. Made when torch is there, as it is torch's subclass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, owner: _Writes) -> None:
            super().__init__()
            self._owner = owner

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return self._owner.call(function, args, kwargs or {})

    return Mode


class _Writes:
    """Sees what is written into a model's memory, and lets it be written."""

    def __init__(self, model: Any, source: _Source) -> None:
        self._storages = set(_storages_of(model))
        self._source = source

    def mode(self) -> Any:
        """The context in which it sees it, on the thread that enters."""
        return _mode_class()(self)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of torch's, which runs inside the context."""
        written = [tensor for tensor in _written(function, args, kwargs) if self._is_models(tensor)]
        if not written:
            return function(*args, **kwargs)
        marks = {id(tensor) for tensor in written}
        sources = [t for t in _tensors((args, kwargs)) if id(t) not in marks]
        return self.write(function, args, kwargs, written, self._source.writes(sources))

    def write(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Any],
        names: list[str],
    ) -> Any:
        """An operation that writes to these tensors of the model's."""
        return function(*args, **kwargs)

    def _is_models(self, tensor: Any) -> bool:
        return _storage_of(tensor) in self._storages


class _Comparison(_Writes):
    """Compares what would be written with what is there, and writes nothing."""

    def __init__(self, model: Any, source: _Source, findings: _Flags | _Masks) -> None:
        super().__init__(model, source)
        self._findings = findings

    def write(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Any],
        names: list[str],
    ) -> Any:
        """See `_Writes`."""
        if function._schema.name == "aten::copy_":
            held, source = args[:2]
            self._compare(held, source.expand(held.shape), names)
            return held
        # On copies: of whatever else writes, what it would leave is only known by doing it.
        copies = {id(tensor): tensor.clone() for tensor in written}
        result = function(*_replaced(args, copies), **_replaced(kwargs, copies))
        originals = {id(copies[id(tensor)]): tensor for tensor in written}
        for tensor in written:
            self._compare(tensor, copies[id(tensor)], names)
        return _replaced(result, originals)

    def _compare(self, held: Any, expected: Any, names: list[str]) -> None:
        for part, theirs in _pieces(held, expected):
            there = theirs.to(device=part.device, dtype=part.dtype)
            differs = _bits(part) != _bits(there)
            self._findings.add(part, differs.any(-1) if part.is_complex() else differs, names)


class _Flags:
    """Which tensors may differ: some write of theirs is not what is there."""

    def __init__(self) -> None:
        self._found: list[tuple[list[str], Any]] = []

    def add(self, held: Any, differs: Any, names: list[str]) -> None:
        """Whether each element of `held`, which has to be of a model, differs."""
        self._found.append((names, differs.any()))  # on the device: looked at in the end

    def names(self) -> list[str]:
        """The tensors; one that is not known is `_SOME`."""
        import torch

        by_device: dict[Any, list[tuple[list[str], Any]]] = {}
        for names, flag in self._found:
            by_device.setdefault(flag.device, []).append((names, flag))
        return [
            name
            for found in by_device.values()
            for (names, _), differs in zip(
                found, torch.stack([flag for _, flag in found]).tolist(), strict=True
            )
            if differs
            for name in names or [_SOME]
        ]


class _Masks:
    """Which tensors differ, where the last write of each place counts."""

    def __init__(self) -> None:
        self._masks: dict[tuple[Any, int], Any] = {}  # of each storage, an element for one of its
        self._parts: list[tuple[list[str], Any]] = []

    def add(self, held: Any, differs: Any, names: list[str]) -> None:
        """As of `_Flags`."""
        import torch

        key = _storage_of(held)
        if key not in self._masks:
            elements = held.untyped_storage().nbytes() // held.element_size()
            self._masks[key] = torch.zeros(elements, dtype=torch.bool, device=held.device)
        mask = self._masks[key].as_strided(held.size(), held.stride(), held.storage_offset())
        mask.copy_(differs)
        self._parts.append((names, mask))

    def names(self) -> list[str]:
        """As of `_Flags`."""
        return [
            name for names, mask in self._parts if bool(mask.any()) for name in names or [_SOME]
        ]


# --- tensors --------------------------------------------------------------------------------------


def _storages_of(model: Any) -> Iterator[tuple[Any, int]]:
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            if tensor.numel():
                yield _storage_of(tensor)


def _storage_of(tensor: Any) -> tuple[Any, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _pieces(held: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """Parts of both along their first dimension, of `_PIECE_BYTES` or a row each."""
    if held.numel() == 0:
        return
    if held.dim() == 0:
        yield held, expected
        return
    row_bytes = held.numel() // held.size(0) * held.element_size()
    rows = max(1, _PIECE_BYTES // row_bytes)
    for at in range(0, held.size(0), rows):
        length = min(rows, held.size(0) - at)
        yield held.narrow(0, at, length), expected.narrow(0, at, length)


def _bits(tensor: Any) -> Any:
    """The tensor's bits as integers, so that NaN equals itself, and 0 is not -0."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()])


@functools.cache
def _writing_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to: their places and names."""
    return tuple(
        (at, argument.name)
        # An operator of higher order has no schema, and writes by others.
        for at, argument in enumerate(getattr(getattr(function, "_schema", None), "arguments", ()))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [
        tensor
        for at, name in _writing_arguments(function)
        for tensor in _tensors(args[at] if at < len(args) else kwargs.get(name))
    ]


def _tensors(value: Any) -> Iterator[Any]:
    import torch
    from torch.utils import _pytree

    return (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _replaced(value: Any, by: dict[int, Any]) -> Any:
    """The value with other tensors in place of those whose ids are keys."""
    from torch.utils import _pytree

    return _pytree.tree_map(lambda leaf: by.get(id(leaf), leaf), value)


# --- running a loader -----------------------------------------------------------------------------


def _run(load: Load, source: _Source, writes: _Writes) -> Any:
    import torch

    with _pools_inline(), torch.no_grad(), writes.mode():
        return load(iter(source))


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
