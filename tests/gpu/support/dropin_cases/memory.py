"""Functions that measure and fill device memory, for the cases."""

from __future__ import annotations

import gc

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def free(device: int = 0) -> int:
    """Return the number of free bytes that the driver reports."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def numbers(count: int, offset: int = 0, device: str = "cuda") -> torch.Tensor:
    """Return `count` MiB that contain a unique pattern."""
    return torch.arange(offset, offset + count * MIB // 4, dtype=torch.int32, device=device)


def sum_of(tensor: torch.Tensor) -> int:
    """Return the sum of all elements. The caller must be outside all regions."""
    return int(tensor.sum(dtype=torch.int64).item())
