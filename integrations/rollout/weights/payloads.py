"""Tensors as text that another process opens as the same memory: CUDA IPC, or shared memory."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

__all__ = ["flattened", "listed"]

# Where reductions of torch have the device of a CUDA tensor.
_DEVICE_ARGUMENT = 6


def flattened(memory: Any, views: Sequence[tuple[str, int, Any]]) -> str:
    """Tensors in one piece of memory, opened as one: SGLang's "flattened_bucket".

    Args:
        memory: bytes, one-dimensional.
        views: names, where each begins in `memory`, and the tensors.
    """
    metadata = [
        # As its class would have it, which this process may not have; only its fields are read.
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
    """Named tensors, each opened by itself. Arguments as of `flattened`."""
    return _serialised([(name, view) for name, _, view in views])


def _serialised(value: Any) -> str:
    import torch
    from torch.multiprocessing import reductions

    # SGLang's, where it has replaced torch's in this process, takes tensors of a GPU only.
    reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)

    def reduced(tensor: Any) -> Any:
        rebuild, arguments = reduce(tensor)
        at = _DEVICE_ARGUMENT
        if tensor.is_cuda and isinstance(arguments[at], int):
            # The other process may number its devices otherwise. SGLang's know them by name.
            name = str(torch.cuda.get_device_properties(arguments[at]).uuid)
            arguments = (*arguments[:at], name, *arguments[at + 1 :])
        return rebuild, arguments

    out = io.BytesIO()
    pickler: Any = ForkingPickler(out)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: reduced}
    pickler.dump(value)
    return base64.b64encode(out.getvalue()).decode()
