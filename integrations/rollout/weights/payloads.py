"""Serializes tensors as text from which another process can open their memory.

The memory is shared through CUDA IPC, as shared host memory, or as part of a shareable region.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

from memsaver._memory.sharing import sending
from memsaver.errors import ConfigError

from ...engine.errors import EngineDiedError
from ...engine.weights.payloads import DEVICE_ARGUMENT, index_of
from ..pickles import unpack

__all__ = ["Receivers", "flattened", "is_unreceived", "listed", "mapped", "opened", "shared"]

# The positions of a CUDA tensor's storage class and counter in torch's reductions.
_STORAGE_ARGUMENT, _COUNTER_ARGUMENT = 4, 11


class Receivers:
    """The receivers of serialized CUDA memory.

    Torch keeps the memory until every receiver has closed it.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[Any, Any, int]] = []

    def add(self, arguments: Sequence[Any]) -> None:
        """Record the receiver of a CUDA tensor that torch has reduced to these arguments."""
        at = _COUNTER_ARGUMENT
        self._counters.append((arguments[_STORAGE_ARGUMENT], *arguments[at : at + 2]))

    def release(self) -> None:
        """Make torch free memory whose receivers died without closing it."""
        for storage, handle, offset in self._counters:
            storage._release_ipc_counter(handle, offset, device="cuda")
        self._counters = []


def is_unreceived(error: BaseException | None, is_sent: bool) -> bool:
    """Return True if no engine will read a payload after an update that ended with `error`.

    Args:
        error: the error of the update; None if the update succeeded.
        is_sent: whether the engine might have received the payload.
    """
    return isinstance(error, EngineDiedError) or (error is not None and not is_sent)


def flattened(
    memory: Any, views: Sequence[tuple[str, int, Any]], receivers: Receivers | None = None
) -> str:
    """Serialize tensors in one block of memory, in SGLang's format "flattened_bucket".

    Args:
        memory: a one-dimensional tensor of bytes.
        views: for each tensor, its name, the offset of its first byte in `memory`, and the tensor.
        receivers: the object that records the receiver.
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
    """Serialize named tensors for a receiver that opens each tensor separately. See `flattened`."""
    return _serialised([(name, view) for name, _, view in views], receivers)


def mapped(named: Sequence[tuple[str, Any]], tokens: list[int]) -> str:
    """Serialize named tensors in shareable regions, for a receiver that opens them together.

    Args:
        named: names and tensors.
        tokens: see `sending.reduce_named`.

    Raises:
        SharingError: the tensors' tag is paused.
    """
    return _pickled(_Named(named, tokens))


class _Named:
    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> Any:
        return sending.reduce_named(*self._arguments)


def shared(memory: Any) -> str:
    """Serialize a tensor as text that another rank of the trainer passes to `opened`."""
    return _pickled(_reduced(memory))


def opened(text: str, device: Any) -> Any:
    """Return a tensor that shares another rank's memory, for copies that run on `device`.

    CUDA maps another process's memory for only one device of this process. Kernels on any other
    device must not access this mapping, even with peer access between the devices. Another GPU's
    memory is therefore mapped for `device`, and torch treats it as memory on `device`. Without peer
    access, the memory is mapped for its own GPU, and torch copies whole blocks to it.

    Args:
        text: see `shared`.
        device: the device of this rank's own memory. CPU memory stays on the CPU.

    Raises:
        ConfigError: this process cannot access the tensor's GPU, which is not visible to it.
    """
    import torch

    rebuild, arguments = unpack(base64.b64decode(text))
    at = DEVICE_ARGUMENT
    if len(arguments) <= at or not isinstance(arguments[at], str):
        return rebuild(*arguments)
    owner, index = index_of(arguments[at]), device.index
    if owner not in (None, index) and not torch.cuda.can_device_access_peer(index, owner):
        index = owner
    try:
        return rebuild(*arguments[:at], index, *arguments[at + 1 :])
    except RuntimeError as error:
        if owner is not None:
            raise
        raise ConfigError(
            f"{device} cannot access GPU {arguments[at]} of another rank, which is not visible to "
            "this rank: let CUDA_VISIBLE_DEVICES name all GPUs of the group"
        ) from error


def _serialised(value: Any, receivers: Receivers | None = None) -> str:
    """Serialize a value that contains tensors."""

    def reduced(tensor: Any) -> Any:
        rebuild, arguments = _reduced(tensor)
        if tensor.is_cuda and receivers is not None:
            receivers.add(arguments)
        return rebuild, arguments

    return _pickled(value, reduced)


def _reduced(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return torch's function for rebuilding a tensor, and arguments with the GPU's UUID."""
    import torch
    from torch.multiprocessing import reductions

    # SGLang may have replaced torch's function in this process with one for CUDA tensors only.
    reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)
    rebuild, arguments = reduce(tensor)
    at = DEVICE_ARGUMENT
    if tensor.is_cuda and isinstance(arguments[at], int):
        # The other process may number its devices differently. SGLang accepts names as well.
        name = str(torch.cuda.get_device_properties(arguments[at]).uuid)
        arguments = (*arguments[:at], name, *arguments[at + 1 :])
    return rebuild, arguments


def _pickled(value: Any, reduced: Any = None) -> str:
    """Pickle a value as text; if `reduced` is not None, it reduces the value's tensors."""
    import torch

    out = io.BytesIO()
    pickler: Any = ForkingPickler(out)
    if reduced is not None:
        pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: reduced}
    pickler.dump(value)
    return base64.b64encode(out.getvalue()).decode()
