"""A fake of torch's graph captures and of the memory pools that they use."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

from memsaver._memory import torch_mode


class Graph:
    """A fake of `torch.cuda.CUDAGraph`."""


class Pools:
    """A fake of torch's allocator.

    Attributes:
        capturing: the ids of the pools that currently receive memory, innermost last.
        captured: the pool of each capture.
        left: the pools that were suspended during a capture.
    """

    def __init__(self) -> None:
        self.capturing: list[tuple[int, int]] = []
        self.captured: list[tuple[int, int]] = []
        self.left: list[tuple[int, int]] = []
        numbers = itertools.count(1)

        class MemPool:
            def __init__(self, allocator: object) -> None:
                self.id = (10**6 + next(numbers), 0)

            def use_count(self) -> int:
                return 1

        memory = SimpleNamespace(
            CUDAPluggableAllocator=lambda *_: SimpleNamespace(allocator=lambda: None)
        )
        cuda = SimpleNamespace(
            CUDAGraph=Graph,
            MemPool=MemPool,
            current_blas_handle=lambda: None,
            current_device=lambda: 0,
            device=lambda _: contextlib.nullcontext(),
            graph=self.graph,
            memory=memory,
            stream=lambda _: contextlib.nullcontext(),
        )
        no_release = SimpleNamespace(_cuda_releasePool=lambda *_: None)
        self.torch = SimpleNamespace(cuda=cuda, _C=no_release)

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.capturing.append(pool)
        self.captured.append(pool)
        yield
        assert self.capturing.pop() == pool

    def leave(self, device: int, pool: tuple[int, int]) -> None:
        assert self.capturing[-1:] == [pool], "torch is not recording to this pool"
        self.capturing.pop()
        self.left.append(pool)

    def enter(self, device: int, pool: tuple[int, int]) -> None:
        self.capturing.append(pool)


def install(monkeypatch) -> Pools:
    """Make memsaver use the fake for captures and return the fake."""
    made = Pools()
    monkeypatch.setattr(torch_mode, "_closed_pools", {})
    monkeypatch.setattr(torch_mode, "_shared_pools", {})
    monkeypatch.setattr(torch_mode, "_pools", [torch_mode.TorchPools(made.torch)])
    return made
