"""Tests into which torch pool a graph is captured, with a fake of torch's pools."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from memsaver import ConfigError
from memsaver._memory import torch_mode


class Allocator:
    """A fake of torch's allocator, in which a pool exists while its use count is above zero."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}
        self.numbers = itertools.count(1)

    def capture(self, pool: tuple[int, int]) -> None:
        """Begin a capture. The graph uses the pool, which must exist, until `release`."""
        assert self.counts[pool] > 0, "torch would make a pool of its own"
        self.counts[pool] += 1

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.counts[pool] -= 1


@pytest.fixture
def allocator():
    return Allocator()


@pytest.fixture
def pools(allocator, monkeypatch):
    class MemPool:
        def __init__(self, functions: object) -> None:
            self.id = (10**6 + next(allocator.numbers), 0)
            allocator.counts[self.id] = 1

        def use_count(self) -> int:
            if allocator.counts[self.id] == 0:
                raise RuntimeError("INTERNAL ASSERT FAILED")  # torch has forgotten the pool
            return allocator.counts[self.id]

    cuda = SimpleNamespace(
        MemPool=MemPool,
        device=lambda device: nullcontext(),
        memory=SimpleNamespace(
            CUDAPluggableAllocator=lambda *names: SimpleNamespace(allocator=lambda: None)
        ),
    )
    monkeypatch.setattr(torch_mode, "_closed_pools", {})
    monkeypatch.setattr(torch_mode, "_shared_pools", {})
    torch = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(_cuda_releasePool=allocator.release))
    return torch_mode.TorchPools(torch)


@pytest.fixture
def capture(pools, allocator):
    """Capture a graph and return its pool."""

    def run(pool: object, tag: str = "graphs", device: int = 0) -> tuple[int, int]:
        with pools.capture_pool(device, tag, pool) as found:
            allocator.capture(found)
        return found

    return run


HANDLE = (0, 7)  # as torch.cuda.graph_pool_handle() returns it


def test_without_a_pool_each_graph_has_its_own(capture, allocator):
    first, second = capture(None), capture(None)
    assert first != second
    assert allocator.counts == {first: 1, second: 1}  # only the graphs keep the pools


def test_the_pool_of_an_earlier_graph_is_used_as_it_is(capture):
    first = capture(None)
    assert capture(first) == first
    assert capture(list(first)) == first


def test_the_pool_of_deleted_graphs_is_not_torchs_own(capture, allocator):
    first = capture(None)
    allocator.release(0, first)
    second = capture(first)
    assert second != first and allocator.counts[second] == 1
    assert capture(first) == second


def test_graphs_with_one_handle_share_one_pool(capture, allocator):
    found = {capture(HANDLE) for _ in range(3)}
    assert len(found) == 1
    assert HANDLE not in found
    assert allocator.counts[found.pop()] == 3


def test_a_pool_object_of_the_callers_is_a_name_too(capture):
    assert capture(SimpleNamespace(id=HANDLE)) == capture(HANDLE)


def test_other_handles_tags_and_devices_share_nothing(capture):
    cases = [capture(HANDLE), capture((0, 8)), capture(HANDLE, tag="b"), capture(HANDLE, device=1)]
    assert len(set(cases)) == 4


def test_a_handle_whose_graphs_are_deleted_gets_a_new_pool(capture, allocator):
    first = capture(HANDLE)
    allocator.release(0, first)
    second = capture(HANDLE)
    assert second != first
    assert capture(HANDLE) == second


def test_a_capture_that_fails_leaves_no_dead_pool_behind(pools, capture, allocator):
    with pytest.raises(ValueError), pools.capture_pool(0, "graphs", HANDLE):
        raise ValueError
    assert set(allocator.counts.values()) == {0}
    capture(HANDLE)


@pytest.mark.parametrize("wrong", [3, "", "ab", (1, 2, 3), object()])
def test_an_invalid_pool_is_rejected(pools, wrong):
    with pytest.raises(ConfigError, match="pool"), pools.capture_pool(0, "graphs", wrong):
        pass
