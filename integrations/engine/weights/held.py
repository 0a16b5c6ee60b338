"""Comparison of a model's contents with the tensors that it loaded, for any layout of the model.

Each model fuses, shards, transposes and casts the tensors that it loads in its own way. To be
independent of the layout, this module runs the model's own loader again on the same tensors.
Instead of writing to the model's memory, it compares the data of each write, bit for bit, with the
memory's contents. A comparison needs only `_PIECE_BYTES` of memory at a time, plus the loader's own
temporary tensors. If contents seem to differ, the loader runs once more, on copies of the affected
storages, to confirm the difference.

A loader's other writes, for example to attributes that are neither parameters nor buffers, are
repeated but not compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from .writes import Load, Named, Operation, Source, Storage, Writes, storage_of

__all__ = ["Load", "Named", "differing", "watched"]

_PIECE_BYTES = 64 << 20
_SOME = "?"  # represents any tensor, if the source of a write is unknown


def watched(model: Any, named: Named, load: Load) -> tuple[Any, tuple[str, ...]]:
    """Load the tensors; return the tensors from which nothing was written to the model's memory.

    Copies that a loader submits to a thread pool run on this thread.

    Args:
        model: a `torch.nn.Module`.
        named: the tensors with their names.
        load: the model's loader. Its exceptions propagate.

    Returns:
        The loader's result and the names of these tensors. The tuple of names is empty if the
        source of a write is unknown, for example if the loader has read all tensors and then writes
        a number that it computed from one of them.
    """
    source = Source(named)
    result = Writes(model, source).run(load)
    if source.blurred:
        return result, ()
    # A tensor without elements cannot be the source of a write.
    return result, tuple(n for n, t in named if n not in source.used and t.numel())


def differing(model: Any, named: Named, load: Load) -> tuple[str, ...]:
    """Return the tensors for which `load` would write contents other than the model's.

    Only the last write to each byte counts. If a byte differs, the result names every tensor from
    which a view with this byte was written, even if a later write overwrote the byte.

    Waits for the device.

    Args:
        model: a `torch.nn.Module`.
        named: the tensors with their names.
        load: the model's loader. Its exceptions propagate.

    Raises:
        RuntimeError: some tensors may differ, but their comparison failed; the message names these
            tensors.
    """
    comparison = _Comparison(model, Source(named))
    comparison.run(load)
    found = comparison.differences.found()
    if not found:
        return ()
    # Memory that is written twice differs from the first write, and casting in pieces may produce
    # different NaNs than a single operation would. A real load on copies of these storages
    # therefore decides.
    suspects = {name for names, _ in found for name in names}
    try:
        replay = _Replay(model, Source(named), {storage for _, storage in found})
        replay.run(load)
        names = {name for names, _ in replay.differences().found() for name in names}
    except Exception as error:
        raise RuntimeError(
            f"{', '.join(sorted(suspects))} may differ, and a second comparison failed "
            f"({type(error).__name__}: {error})"
        ) from error
    # A write of unknown source may come from any of the tensors.
    return tuple(name for name, _ in named if name in names or names == {_SOME})


class _Comparison(Writes):
    """Compares each write with the model's contents, without writing anything.

    Attributes:
        differences: the writes that differ from the contents.
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
        # Runs on copies, because any other operation must run before its result is known.
        copies = {id(tensor): tensor.clone() for tensor in written}
        result = operation.run(copies)
        for tensor in written:
            self._compare(tensor, copies[id(tensor)], names)
        return result

    def _compare(self, held: Any, expected: Any, names: list[str]) -> None:
        for part, wanted in _pieces(held, expected):
            there = wanted.to(device=part.device, dtype=part.dtype)
            differs = _bits(part) != _bits(there)
            if wanted.dtype != part.dtype and (part.is_floating_point() or part.is_complex()):
                differs |= _elements(part).isnan()  # a NaN's payload depends on the cast
            self.differences.add(names, held, differs.any())


class _Replay(Writes):
    """Runs the load on copies of some of a model's storages, and leaves all others unchanged.

    Operations also read the copies, so a loader can depend on its own earlier writes.

    Args:
        model: see `Writes`.
        source: see `Writes`.
        storages: the storages to copy. All writes to other storages are known to match the
            existing contents of those storages.
    """

    def __init__(self, model: Any, source: Source, storages: set[Storage]) -> None:
        super().__init__(model, source)
        self._copied = storages
        self._copies: dict[Storage, Any] = {}
        self._parts: list[tuple[list[str], Any]] = []

    def read(self, operation: Operation) -> Any:
        """See `Writes`. Views remain views of the model's memory."""
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
        """Return, by tensor id, the views of the copies that replace the operation's tensors."""
        tensors = operation.tensors()
        return {id(t): self._twin(t) for t in tensors if storage_of(t) in self._copied}

    def differences(self) -> _Differences:
        """Return the writes whose targets differ from their copies."""
        differences = _Differences()
        for names, held in self._parts:
            for part, wanted in _pieces(_bytes_of(held), _bytes_of(self._twin(held))):
                differences.add(names, held, (part != wanted).any())
        return differences

    def _twin(self, tensor: Any) -> Any:
        """Return the tensor's view of its storage's copy."""
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
    """The writes that differ from the model's contents.

    The results of the comparisons stay on the device until `found` is called.
    """

    def __init__(self) -> None:
        self._all: list[tuple[list[str], Storage, Any]] = []

    def add(self, names: list[str], held: Any, differs: Any) -> None:
        """Add a write.

        Args:
            names: the names of the tensors from which the write's data comes; empty if unknown.
            held: the model's tensor that the write changes.
            differs: a boolean tensor with one element, on the device.
        """
        self._all.append((names or [_SOME], storage_of(held), differs))

    def found(self) -> list[tuple[list[str], Storage]]:
        """Return the source tensors and the storage of each write that differs.

        `_SOME` stands for an unknown tensor.
        """
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
    """Yield parts of both tensors along the first dimension: up to `_PIECE_BYTES`, or one row."""
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
    """Return a tensor's bits as integers, so that NaN equals itself and 0 differs from -0."""
    import torch

    tensor = _elements(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()])


def _elements(tensor: Any) -> Any:
    """Return a tensor's values, with complex numbers as pairs of real numbers."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes_of(tensor: Any) -> Any:
    """Return a view of a tensor's bytes in memory, with one additional dimension."""
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
    """Return whether an operation's result is a view of an argument."""
    returns = getattr(getattr(function, "_schema", None), "returns", ())
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
