"""Functions shared by the cases: tensors with a pattern, the tags' memory, and free memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch

import memsaver

MIB = 1 << 20
GIB = 1 << 30
NOISE = 4 * MIB  # the driver's own allocations between two readings


def tidy() -> None:
    """Release torch's cached memory that is not in use."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free(device: int = 0) -> int:
    """Return the number of free bytes that the driver reports."""
    tidy()
    return torch.cuda.mem_get_info(device)[0]


def held(tag: str) -> int:
    """Return the tag's resident device memory as memsaver reports it."""
    return sum(row.resident_bytes for row in memsaver.stats()[tag])


def allocated(tag: str) -> int:
    """Return the number of bytes in a tag's live allocations."""
    return sum(row.allocated_bytes for row in memsaver.stats()[tag])


def inside(tensor: torch.Tensor, tag: str) -> bool:
    """Return whether a tensor's memory belongs to a tag."""
    start = tensor.data_ptr()
    return any(r.address <= start < r.address + r.bytes for r in memsaver.ranges(tag))


def numbered(count: int, number: int = 1, device: str = "cuda") -> torch.Tensor:
    """Return a tensor of `count` MiB with a pattern that depends on `number`."""
    tensor = torch.arange(count * MIB // 4, dtype=torch.int32, device=device)
    return tensor.mul_(2 * number + 1)


def is_numbered(tensor: torch.Tensor, number: int = 1) -> bool:
    """Return whether the tensor still contains the pattern."""
    count = tensor.numel() * 4 // MIB
    return torch.equal(tensor, numbered(count, number, str(tensor.device)))


def on_thread(function: Callable[[], object]) -> None:
    """Run a function on another thread and wait for it."""
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
