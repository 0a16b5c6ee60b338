"""Measures the device memory that an engine's process still uses while its tags are released.

| part | contents |
|---|---|
| `tags` | memory that is still mapped in memsaver's tags |
| `graphs` | torch's private pools outside tags, used by CUDA graphs that cannot be paused |
| `tensors` | torch's tensors outside tags and private pools, including cuBLAS's workspaces |
| `cache` | torch's cached memory that no tensor uses |
| `nccl` | memory of NCCL's communicators, if NCCL reports it |
| `context` | the process's remaining memory, such as its CUDA context and libraries' allocations |
| `rest` | all other memory in use on the device, such as that of other processes |
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import memsaver
from memsaver._memory.device_processes import own_bytes
from memsaver._runtime.native import _C

from .errors import EngineError

if TYPE_CHECKING:  # nccl.py imports this module
    from .nccl import Communicator

__all__ = [
    "PARTS",
    "clear_workspaces",
    "device",
    "measure",
    "of_segments",
    "release_cache",
    "torch_with_cuda",
    "use_device",
]

PARTS = ("tags", "graphs", "tensors", "cache", "nccl", "context", "rest")


def torch_with_cuda() -> Any:
    """Return the torch module if torch has CUDA contexts in this process; None otherwise."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def device() -> int:
    """Return torch's current device; 0 if torch has no CUDA context in this process."""
    torch = torch_with_cuda()
    return 0 if torch is None else int(torch.cuda.current_device())


def use_device(device: int) -> None:
    """Set this thread's current device, if torch has a CUDA context in this process."""
    torch = torch_with_cuda()
    if torch is not None:
        torch.cuda.set_device(device)


def measure(device: int, communicators: Iterable[Communicator] = ()) -> dict[str, int]:
    """Return the number of bytes in each part.

    `nccl` is missing if NCCL cannot report the memory of each communicator. `context` is missing if
    NVML is not available, does not report this process (as in some containers), or disagrees with
    the driver.
    """
    free, total = memsaver.device_memory(device)
    own = own_bytes(device)
    found = dict.fromkeys(PARTS, 0)
    found["tags"] = sum(int(row["resident_bytes"]) for row in _C.stats() if row["device"] == device)
    found |= of_segments(_segments(device))
    try:
        found["nccl"] = sum(one.nccl.held_bytes(one.handle) for one in communicators)
    except (AttributeError, EngineError):  # an old NCCL, or memory that NCCL does not count
        del found["nccl"]
    known = sum(found.values())
    # In a container, NVML may report the host's process ids, and another process may have this id.
    # If that process uses a plausible amount of memory, its use is counted as this process's
    # context.
    if own is not None and known <= own <= total - free:
        found["context"] = own - known
    else:
        del found["context"]
    found["rest"] = max(0, total - free - sum(found.values()))
    return found


def of_segments(segments: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of torch's segments outside tags, by part."""
    found = {"graphs": 0, "tensors": 0, "cache": 0}
    for segment in segments:
        if _C.owns(segment["address"]):
            continue
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            found["graphs"] += segment["total_size"]
        else:
            found["tensors"] += segment["allocated_size"]
            found["cache"] += segment["total_size"] - segment["allocated_size"]
    return found


def release_cache() -> None:
    """Release torch's cached memory to the driver."""
    torch = torch_with_cuda()
    if torch is not None:
        torch.cuda.empty_cache()


def clear_workspaces(device: int) -> None:
    """Release cuBLAS's workspaces, which torch allocates again when they are needed.

    Does nothing if torch has a private pool outside tags, because CUDA graphs use such pools and
    contain the workspaces' addresses. The caller must check whether tags contain graphs.
    """
    torch = torch_with_cuda()
    if torch is not None and not of_segments(_segments(device))["graphs"]:
        with contextlib.suppress(AttributeError):  # a torch version without this private function
            torch._C._cuda_clearCublasWorkspaces()


def _segments(device: int) -> list[Mapping[str, Any]]:
    torch = torch_with_cuda()
    if torch is None:
        return []
    return [one for one in torch.cuda.memory_snapshot() if one["device"] == device]
