"""Copies of small tensors in host memory, for the time in which an engine's memory is released."""

from __future__ import annotations

from typing import Any

__all__ = ["to_host"]


def to_host(tensor: Any) -> Any:
    """Return a copy of a tensor in host memory.

    The memory is pinned if the tensor is on a GPU and the driver can pin it, because copies from
    and to pageable memory take many times as long. torch keeps freed pinned memory for later
    copies.
    """
    import torch

    try:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError:  # the memory cannot be pinned
        copy = torch.empty_like(tensor, device="cpu")
    return copy.copy_(tensor)
