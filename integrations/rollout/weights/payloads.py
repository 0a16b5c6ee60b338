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

__all__ = ["flattened", "listed"]

# The position of a CUDA tensor's device in torch's reductions.
_DEVICE_ARGUMENT = 6


def flattened(memory: Any, views: Sequence[tuple[str, int, Any]]) -> str:
    """Serialise tensors in one piece of memory, in SGLang's format "flattened_bucket".

    Args:
        memory: bytes, one-dimensional.
        views: for each tensor its name, the offset of its first byte in `memory`, and the tensor.
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
    return _serialised({"flattened_tensor": memory, "metadata": metadata})


def listed(views: Sequence[tuple[str, int, Any]]) -> str:
    """Serialise named tensors, each of which is opened separately. See `flattened`."""
    return _serialised([(name, view) for name, _, view in views])


def _serialised(value: Any) -> str:
    import torch
    from torch.multiprocessing import reductions

    # SGLang may have replaced torch's function in this process with one for CUDA tensors only.
    reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)

    def reduced(tensor: Any) -> Any:
        rebuild, arguments = reduce(tensor)
        at = _DEVICE_ARGUMENT
        if tensor.is_cuda and isinstance(arguments[at], int):
            # The other process may number its devices differently. SGLang accepts names as well.
            name = str(torch.cuda.get_device_properties(arguments[at]).uuid)
            arguments = (*arguments[:at], name, *arguments[at + 1 :])
        return rebuild, arguments

    out = io.BytesIO()
    pickler: Any = ForkingPickler(out)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: reduced}
    pickler.dump(value)
    return base64.b64encode(out.getvalue()).decode()
