"""Helper functions for tests of programs that use the package."""

from __future__ import annotations

from torch_memory_saver.utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    """Return torch's name for the device that tests use."""
    return "cuda"


def empty_cache() -> None:
    """Release torch's unused cached memory."""
    import torch

    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Print and return the number of bytes that all processes use on a GPU."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu_id)
    print(f"GPU {gpu_id}: {(total - free) / 2**30:.2f} GiB in use ({message})")
    return int(total - free)
