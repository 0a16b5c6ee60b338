"""Small helpers for tests of programs that use the package."""

from __future__ import annotations

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device"]


def get_device() -> str:
    """The device for tests, as torch names it."""
    return "cuda"


def empty_cache() -> None:
    """Let torch give back what no tensor uses."""
    import torch

    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Print how much memory of a GPU is in use, by all processes, and return it in bytes."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu_id)
    print(f"GPU {gpu_id}: {(total - free) / 2**30:.2f} GiB in use ({message})")
    return int(total - free)
