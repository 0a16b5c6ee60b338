"""Copies a model's buffers to host memory, to keep them while an engine's memory is released."""

from __future__ import annotations

from typing import Any

__all__ = ["to_host"]


def to_host(tensor: Any) -> Any:
    """Copy a tensor to new host memory, and return the copy.

    For a tensor on a GPU, the memory is pinned if the driver allows it, because copies to and from
    pageable memory take several times as long. torch keeps freed pinned memory for later copies
    until the process exits; memsaver's statistics do not count this memory.

    Raises:
        RuntimeError: host memory is exhausted, or the copy fails.
    """
    import torch

    try:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError:  # if the device has failed, `copy_` raises an error too
        copy = torch.empty_like(tensor, device="cpu")
    return copy.copy_(tensor)
