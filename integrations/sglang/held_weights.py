"""What a model holds, compared with what it was given, in whatever layout the model has.

Models fuse, shard, transpose and cast what they load, each in its own way. So nothing here knows of
layouts: the model's own loader is run once more on the same tensors, and where it would write into
the model's memory, what it would write is compared, bit for bit, with what is there. Nothing is
written. Comparing takes little memory: `_PIECE_BYTES` at a time, plus what the loader itself makes.
Only if something seems to differ, the loader is run a last time, on copies of the storages with a
difference, which decides.

What a loader writes elsewhere, such as attributes that are neither parameters nor buffers, is
written again as in any load, and not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from memsaver.integrations.sglang.loader_writes import (
    Load,
    Named,
    Operation,
    Source,
    Storage,
    Writes,
    storage_of,
)

__all__ = ["Load", "Named", "differing", "watched"]

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
    source = Source(named)
    result = Writes(model, source).run(load)
    if source.blurred:
        return result, ()
    # From a tensor without elements nothing can be written.
    return result, tuple(n for n, t in named if n not in source.used and t.numel())


def differing(model: Any, named: Named, load: Load) -> tuple[str, ...]:
    """Return the names of the tensors of which the model holds something else than `load` writes.

    A byte counts as the last write to it leaves it. If a byte differs, every tensor is named from
    which a view with this byte was written, also if a later write went to the same byte.

    Waits for the device.

    Args:
        model: a `torch.nn.Module`.
        named: names and tensors.
        load: the model's loader. What it raises passes through.

    Raises:
        RuntimeError: some tensors, which it names, may differ, and comparing them failed.
    """
    comparison = _Comparison(model, Source(named))
    comparison.run(load)
    found = comparison.differences.found()
    if not found:
        return ()
    # A place that is written twice differs from the first write, and a cast need not give the same
    # NaN in pieces as in one operation: the load itself decides, on copies of these storages.
    suspects = {name for names, _ in found for name in names}
    try:
        replay = _Replay(model, Source(named), {storage for _, storage in found})
        replay.run(load)
        names = {name for names, _ in replay.differences().found() for name in names}
    except Exception as error:
        raise RuntimeError(
            f"{', '.join(sorted(suspects))} may differ, and a closer look failed "
            f"({type(error).__name__}: {error})"
        ) from error
    # If the source of a write is not known, it may be any of the tensors.
    return tuple(name for name, _ in named if name in names or names == {_SOME})


class _Comparison(Writes):  # type: ignore[misc]  # its base is Any to mypy
    """Compares what would be written with what is there, and writes nothing.

    Attributes:
        differences: every write that is not what is there.
    """

    def __init__(self, model: Any, source: Source) -> None:
        super().__init__(model, source)
        self.differences = _Differences()

    def write(self, operation: Operation, written: list[Any], names: list[str]) -> Any:
        """See `Writes`."""
        if operation.is_copy:
            held, source = operation.args[:2]
            self._compare(held, source.expand(held.shape), names)
            return held
        # On copies: of whatever else writes, what it would leave is only known by doing it.
        copies = {id(tensor): tensor.clone() for tensor in written}
        result = operation.run(copies)
        for tensor in written:
            self._compare(tensor, copies[id(tensor)], names)
        return result

    def _compare(self, held: Any, expected: Any, names: list[str]) -> None:
        for part, theirs in _pieces(held, expected):
            there = theirs.to(device=part.device, dtype=part.dtype)
            differs = _bits(part) != _bits(there)
            if theirs.dtype != part.dtype and (part.is_floating_point() or part.is_complex()):
                differs |= _elements(part).isnan()  # whose payload depends on how it was cast
            self.differences.add(names, held, differs.any())


class _Replay(Writes):  # type: ignore[misc]  # likewise
    """Runs the load on copies of some of a model's storages, and leaves all others alone.

    Operations read the copies, too, so that what a loader makes of its own earlier writes is right.

    Args:
        model: see `Writes`.
        source: see `Writes`.
        storages: those of which there are copies. In all others every write is what is there.
    """

    def __init__(self, model: Any, source: Source, storages: set[Storage]) -> None:
        super().__init__(model, source)
        self._copied = storages
        self._copies: dict[Storage, Any] = {}
        self._parts: list[tuple[list[str], Any]] = []

    def read(self, operation: Operation) -> Any:
        """See `Writes`. Views stay views of the model's memory."""
        return operation.run({} if _is_view(operation.function) else self._twins(operation))

    def write(self, operation: Operation, written: list[Any], names: list[str]) -> Any:
        """See `Writes`."""
        twins = self._twins(operation)
        for tensor in written:
            if id(tensor) in twins:
                self._parts.append((names, tensor))
            elif operation.is_copy:
                return tensor
            else:
                twins[id(tensor)] = tensor.clone()
        return operation.run(twins)

    def _twins(self, operation: Operation) -> dict[int, Any]:
        """Return the copies' views in place of the arguments, by the arguments' ids."""
        tensors = operation.tensors()
        return {id(t): self._twin(t) for t in tensors if storage_of(t) in self._copied}

    def differences(self) -> _Differences:
        """Return the writes to places that hold something else than the copies do now."""
        differences = _Differences()
        for names, held in self._parts:
            for part, theirs in _pieces(_bytes_of(held), _bytes_of(self._twin(held))):
                differences.add(names, held, (part != theirs).any())
        return differences

    def _twin(self, tensor: Any) -> Any:
        """Return the same view of the copy of a tensor's storage."""
        import torch

        storage = storage_of(tensor)
        if storage not in self._copies:
            self._copies[storage] = _storage_bytes(tensor).clone()
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            self._copies[storage].untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        twin = twin.conj() if tensor.is_conj() else twin
        return torch._neg_view(twin) if tensor.is_neg() else twin


class _Differences:
    """Which writes differ from what is there. Their results stay on the device until the end."""

    def __init__(self) -> None:
        self._all: list[tuple[list[str], Storage, Any]] = []

    def add(self, names: list[str], held: Any, differs: Any) -> None:
        """Add a write.

        Args:
            names: the tensors that it is from; none if that is not known.
            held: the model's tensor that it is to.
            differs: one boolean, on the device.
        """
        self._all.append((names or [_SOME], storage_of(held), differs))

    def found(self) -> list[tuple[list[str], Storage]]:
        """Return the tensors and the storage of each write that differs; `_SOME` is any tensor."""
        import torch

        by_device: dict[Any, list[tuple[list[str], Storage, Any]]] = {}
        for one in self._all:
            by_device.setdefault(one[2].device, []).append(one)
        return [
            (names, storage)
            for some in by_device.values()
            for (names, storage, _), differs in zip(
                some, torch.stack([flag for _, _, flag in some]).tolist(), strict=True
            )
            if differs
        ]


# --- tensors --------------------------------------------------------------------------------------


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
    """Return a tensor's bits as integers, so that NaN equals itself, and 0 is not -0."""
    import torch

    tensor = _elements(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()])


def _elements(tensor: Any) -> Any:
    """Return a tensor's values, complex ones as pairs."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes_of(tensor: Any) -> Any:
    """Return a view of a tensor's bytes as they lie in memory, with one more dimension."""
    import torch

    size = tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (*tensor.size(), size),
        (*(step * size for step in tensor.stride()), 1),
    )


def _storage_bytes(tensor: Any) -> Any:
    """Return a view of all bytes of a tensor's storage."""
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


@functools.cache
def _is_view(function: Any) -> bool:
    """Whether an operation's result is memory of an argument's."""
    returns = getattr(getattr(function, "_schema", None), "returns", ())
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
