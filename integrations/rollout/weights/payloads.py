"""Serialises tensors as text with which another process can open their memory.

The memory is shared through CUDA IPC or as shared host memory.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

from ...engine.weights.payloads import rebuilt
from ..pickles import unpack

__all__ = ["Receivers", "flattened", "listed", "opened", "shared"]

# The positions of a CUDA tensor's storage class, device and counter in torch's reductions.
_STORAGE_ARGUMENT, _DEVICE_ARGUMENT, _COUNTER_ARGUMENT = 4, 6, 11


class Receivers:
    """The receivers of serialised CUDA memory. Torch keeps the memory until each has closed it."""

    def __init__(self) -> None:
        self._counters: list[tuple[Any, Any, int]] = []

    def add(self, arguments: Sequence[Any]) -> None:
        """Remember the receiver of a CUDA tensor with these arguments of torch's reduction."""
        at = _COUNTER_ARGUMENT
        self._counters.append((arguments[_STORAGE_ARGUMENT], *arguments[at : at + 2]))

    def release(self) -> None:
        """Make torch free the memory although its receivers, which are dead, have not closed it."""
        for storage, handle, offset in self._counters:
            storage._release_ipc_counter(handle, offset, device="cuda")
        self._counters = []


def flattened(
    memory: Any, views: Sequence[tuple[str, int, Any]], receivers: Receivers | None = None
) -> str:
    """Serialise tensors in one piece of memory, in SGLang's format "flattened_bucket".

    Args:
        memory: bytes, one-dimensional.
        views: for each tensor its name, the offset of its first byte in `memory`, and the tensor.
        receivers: records the receiver.
    """
    metadata = [
        # The fields of SGLang's class, which this process may lack; SGLang reads only the fields.
        SimpleNamespace(
            name=name,
            shape=view.shape,
            dtype=view.dtype,
            start_idx=begin,
            end_idx=begin + view.numel() * view.element_size(),
            numel=view.numel() * view.element_size(),
        )
        for name, begin, view in views
    ]
    return _serialised({"flattened_tensor": memory, "metadata": metadata}, receivers)


def listed(views: Sequence[tuple[str, int, Any]], receivers: Receivers | None = None) -> str:
    """Serialise named tensors, each of which is opened separately. See `flattened`."""
    return _serialised([(name, view) for name, _, view in views], receivers)


def shared(memory: Any) -> str:
    """Serialise a tensor, for `opened` in another rank of the trainer."""
    return _serialised(memory, through=rebuilt)


def opened(text: str) -> Any:
    """Return the tensor of another rank, in the same memory.

    Raises:
        ConfigError: the tensor's GPU is not visible to this process.
    """
    return unpack(base64.b64decode(text))


def _serialised(value: Any, receivers: Receivers | None = None, through: Any = None) -> str:
    """Serialise tensors; `through`, if given, rebuilds them from a function and its arguments."""
    import torch
    from torch.multiprocessing import reductions

    # SGLang may have replaced torch's function in this process with one for CUDA tensors only.
    reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)

    def reduced(tensor: Any) -> Any:
        rebuild, arguments = reduce(tensor)
        at = _DEVICE_ARGUMENT
        if tensor.is_cuda and receivers is not None:
            receivers.add(arguments)
        if tensor.is_cuda and isinstance(arguments[at], int):
            # The other process may number its devices differently. SGLang accepts names as well.
            name = str(torch.cuda.get_device_properties(arguments[at]).uuid)
            arguments = (*arguments[:at], name, *arguments[at + 1 :])
        return (rebuild, arguments) if through is None else (through, (rebuild, arguments))

    out = io.BytesIO()
    pickler: Any = ForkingPickler(out)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: reduced}
    pickler.dump(value)
    return base64.b64encode(out.getvalue()).decode()
