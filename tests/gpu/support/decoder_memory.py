"""Functions that compare, measure and fill device memory, for the decoder scenario."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

import memsaver

MIB = 1 << 20
TAGS = ("weights", "kv_cache", "cuda_graph")
HEADROOM = (
    1536 * MIB
)  # left free when the device is filled: for kernels, their modules and temporaries


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, for bitwise comparison."""
    return tensor.reshape(-1).view(torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise identical."""
    return torch.equal(bits(left), bits(right))


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Return the tensors' size in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


def lies_in(tensor: torch.Tensor, ranges: tuple[memsaver.Range, ...]) -> bool:
    """Return whether a tensor's memory is inside one of the ranges."""
    start = tensor.data_ptr()
    return any(r.address <= start and start + tensor.nbytes <= r.address + r.bytes for r in ranges)


def tidy(devices: list[int]) -> None:
    """Release torch's cached memory that is not in use."""
    gc.collect()
    for device in devices:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def free(device: int) -> int:
    """Return the number of free bytes that the driver reports."""
    return torch.cuda.mem_get_info(device)[0]


def resident(device: int, tags: tuple[str, ...] = TAGS) -> int:
    """Return the tags' resident bytes as memsaver reports them."""
    rows = memsaver.stats().tags
    return sum(row.resident_bytes for row in rows if row.device == device and row.tag in tags)


def use_of(device: int, bytes_to_fill: int) -> int:
    """Act as a trainer: allocate `bytes_to_fill` bytes, run computations on them, and free them."""
    chunk = 256 * MIB
    side = 4096
    with torch.cuda.device(device):
        chunks = [
            torch.full((chunk // 2,), 1.0, dtype=torch.bfloat16, device="cuda")
            for _ in range(bytes_to_fill // chunk)
        ]
        for number, values in enumerate(chunks):
            square = values[: side * side].view(side, side)
            square.mul_(number % 3)
            product = square @ square
            assert product[-1, -1].item() == side * (number % 3) ** 2
            assert values[side * side :].min().item() == 1.0
        return nbytes(chunks)


@contextlib.contextmanager
def filled(devices: list[int]) -> Iterator[None]:
    """Fill all memory except HEADROOM, to make a trainer depend on memory that a pause releases."""
    tidy(devices)
    ballast = []
    for device in devices:
        spare = free(device) - HEADROOM
        ballast.append(torch.empty(max(spare, 0), dtype=torch.uint8, device=f"cuda:{device}"))
    yield
    del ballast
    torch.cuda.empty_cache()
