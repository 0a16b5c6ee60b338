"""What the cases share: tensors with a pattern, their tags, and what the driver has free."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch

import memsaver

MIB = 1 << 20
GIB = 1 << 30
NOISE = 4 * MIB  # the driver's own housekeeping between two readings


def tidy() -> None:
    """Lets torch give back what no tensor uses."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free(device: int = 0) -> int:
    """Free bytes, as the driver says."""
    tidy()
    return torch.cuda.mem_get_info(device)[0]


def held(tag: str) -> int:
    """Device memory of a tag, as memsaver says."""
    return sum(row.resident_bytes for row in memsaver.stats()[tag])


def allocated(tag: str) -> int:
    """Bytes of a tag's live allocations."""
    return sum(row.allocated_bytes for row in memsaver.stats()[tag])


def inside(tensor: torch.Tensor, tag: str) -> bool:
    """Whether a tensor's memory belongs to a tag."""
    start = tensor.data_ptr()
    return any(r.address <= start < r.address + r.bytes for r in memsaver.ranges(tag))


def numbered(count: int, number: int = 1, device: str = "cuda") -> torch.Tensor:
    """`count` MiB of a pattern of their own."""
    tensor = torch.arange(count * MIB // 4, dtype=torch.int32, device=device)
    return tensor.mul_(2 * number + 1)


def is_numbered(tensor: torch.Tensor, number: int = 1) -> bool:
    """Whether the pattern is still there."""
    count = tensor.numel() * 4 // MIB
    return torch.equal(tensor, numbered(count, number, str(tensor.device)))


def on_thread(function: Callable[[], object]) -> None:
    """Runs a function on another thread and waits for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
