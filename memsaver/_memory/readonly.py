"""Tensors that can be read but not written. Importing this module imports torch.

The tensors reject writes by torch's own operations, by torch.distributed's collectives and by
NumPy. A write through `data_ptr()` is not detected. C++ functions that receive a tensor in a nested
list, such as `torch.distributed.scatter`, need a copy of the tensor. `torch.utils.dlpack.to_dlpack`
also needs a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from memsaver.errors import InvalidStateError

__all__ = ["ReadOnlyTensor", "read_only"]

_ADVICE = (
    "this tensor is a read-only view of a backup: change a copy (`.clone()`), or use "
    "`backup_view(tensor, writable=True)`, whose changes the resume restores"
)


class ReadOnlyTensor(torch.Tensor):  # type: ignore[misc]  # torch is not followed by mypy
    """A view of a tensor whose in-place operations raise `InvalidStateError`.

    Views of a read-only tensor are also read-only. Results computed from a read-only tensor are
    ordinary tensors. Pickling and deep copies create ordinary tensors with their own contents.
    """

    # The object has no memory of its own: only the methods below access the memory of `_tensor`.
    _tensor: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> ReadOnlyTensor:
        """Create a read-only view of an ordinary tensor, which must not require a gradient."""
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
        )
        view._tensor = tensor
        return view  # type: ignore[no-any-return]

    # Called below torch's C++ code for every operation, after autograd.
    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reject operations that write, and return views of read-only memory as read-only
        tensors.
        """
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        # The schemas of torch.distributed's collectives do not mark the arguments that the
        # collectives write.
        is_collective = func.namespace == "c10d" and func._schema.name.endswith("_")
        for index, argument in enumerate(arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            written = written or (is_collective and not argument.name.startswith("input"))
            if written and any(isinstance(part, ReadOnlyTensor) for part in _parts(value)):
                raise InvalidStateError(f"{func} writes in place, and {_ADVICE}")
        guarded: set[int] = set()
        results = func(*_plain(args, guarded), **_plain(kwargs, guarded))
        return _wrapped(results, guarded)

    # Called before `__torch_dispatch__` for every function of torch's Python API; does not convert
    # results.
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function as torch would run it for an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        """Return the ordinary tensor's `repr`, marked as read-only."""
        return f"ReadOnlyTensor({self._tensor!r})"

    def data_ptr(self) -> int:
        """Return the address of the tensor's data."""
        return int(self._tensor.data_ptr())

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._tensor.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a read-only NumPy array over the same memory."""
        array = self._tensor.numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        found = array if dtype is None else array.astype(dtype, copy=False)
        if copy is False and found is not array:
            raise ValueError(f"{array.dtype} cannot be read as {found.dtype} without a copy")
        return found.copy() if copy and found is array else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._tensor.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._tensor.clone()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise InvalidStateError(f"DLPack exports writable memory, and {_ADVICE}")

    def untyped_storage(self) -> Any:
        """Raise InvalidStateError, because a storage would be writable."""
        raise InvalidStateError(f"a storage is writable memory, and {_ADVICE}")

    storage = untyped_storage
    share_memory_ = untyped_storage


def read_only(tensor: torch.Tensor) -> ReadOnlyTensor:
    """Return a read-only view of a tensor."""
    return ReadOnlyTensor(tensor)


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _plain(value: Any, guarded: set[int]) -> Any:
    """Return the arguments as ordinary tensors, and add the addresses of their storages to
    `guarded`.
    """
    if isinstance(value, ReadOnlyTensor):
        guarded.add(value._tensor.untyped_storage()._cdata)
        return value._tensor
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(part, guarded) for part in value])
    if isinstance(value, dict):
        return {name: _plain(part, guarded) for name, part in value.items()}
    return value


def _wrapped(value: Any, guarded: set[int]) -> Any:
    """Return the results, with views of guarded memory turned into read-only views."""
    if isinstance(value, (list, tuple)):
        return type(value)([_wrapped(part, guarded) for part in value])
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    return ReadOnlyTensor(value) if value.untyped_storage()._cdata in guarded else value
