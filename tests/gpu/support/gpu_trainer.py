"""Memory that another program uses on the GPU."""

from __future__ import annotations

import gc

import torch

MIB = 1 << 20
GIB = 1 << 30


class Trainer:
    """Allocations that fill a GPU except for a margin and contain a known pattern.

    `bytes` is the total size of the 1 GiB blocks. `free` releases the blocks to the driver.
    """

    def __init__(self, gpu: int, margin: int, pattern: int) -> None:
        self._gpu, self._pattern = gpu, pattern
        self._blocks: list[torch.Tensor] = []
        while torch.cuda.mem_get_info(gpu)[0] >= margin + GIB:
            shape = (GIB // 8,)
            block = torch.full(shape, pattern, dtype=torch.int64, device=f"cuda:{gpu}")
            torch.cuda.synchronize(gpu)
            self._blocks.append(block)

    @property
    def bytes(self) -> int:
        return GIB * len(self._blocks)

    def is_intact(self) -> bool:
        """Return whether the blocks still contain the pattern."""
        return all(bool((block == self._pattern).all()) for block in self._blocks)

    def free(self) -> None:
        self._blocks.clear()
        gc.collect()
        torch.cuda.synchronize(self._gpu)
        torch.cuda.empty_cache()
