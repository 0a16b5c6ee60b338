"""Tests torch memory pools whose memory belongs to a tag."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from expected_errors import raises

import memsaver
from torch_cases.tensors import (
    MIB,
    allocated,
    free,
    held,
    inside,
    is_numbered,
    numbered,
    on_thread,
    tidy,
)


def case_torch_pool(tag: str) -> None:
    """On every thread, a pool's tensors belong to the pool's tag or, in a region, to either tag."""
    pool = memsaver.torch_pool(tag, backup="host")
    assert isinstance(pool, torch.cuda.MemPool)
    made: list[Any] = []
    with torch.cuda.use_mem_pool(pool):
        made.append(numbered(16, 0))
    with torch.cuda.use_mem_pool(pool):
        made.append(numbered(16, 1))
    with memsaver.region(tag + ".other"):
        with torch.cuda.use_mem_pool(pool):  # torch decides which of the two applies
            other = numbered(4, 9)
            print("nested in a region: the pool's" if inside(other, tag) else "the region's")

    def work() -> None:
        with torch.cuda.use_mem_pool(pool):
            made.append(numbered(16, 2))

    on_thread(work)
    plain = numbered(4, 8)
    assert all(inside(tensor, tag) for tensor in made)
    assert inside(other, tag + ".other") or inside(other, tag)
    assert not inside(plain, tag) and not inside(plain, tag + ".other")
    addresses = [tensor.data_ptr() for tensor in made]
    before = free()
    report = memsaver.pause(tag)
    assert report.copied_bytes >= 48 * MIB and held(tag) == 0
    assert free() - before >= 48 * MIB - 32 * MIB  # pinned memory uses some on the device
    assert is_numbered(plain, 8)
    memsaver.resume(tag)
    assert is_numbered(other, 9)
    assert [tensor.data_ptr() for tensor in made] == addresses
    assert all(is_numbered(tensor, number) for number, tensor in enumerate(made))


def case_torch_pool_is_closed_with_its_last_reference(tag: str) -> None:
    """torch keeps deleted tensors' memory until the pool is closed; live tensors outlive the
    pool.
    """
    pool = memsaver.torch_pool(tag, backup="host")
    with torch.cuda.use_mem_pool(pool):
        kept, deleted = numbered(64, 1), numbered(64, 2)
    del deleted
    tidy()
    assert allocated(tag) >= 128 * MIB
    assert memsaver.pause(tag).copied_bytes >= 128 * MIB
    memsaver.resume(tag)
    del pool
    tidy()
    assert allocated(tag) == 64 * MIB
    assert memsaver.pause(tag).copied_bytes in (0, 64 * MIB)  # 0: equal to its kept backup
    memsaver.resume(tag)
    assert is_numbered(kept, 1)
    del kept
    tidy()
    assert allocated(tag) == 0


def case_torch_pool_in_use(tag: str) -> None:
    """A pause fails while a thread uses the pool.

    Graphs that keep the pool do not prevent a pause.
    """
    pool = memsaver.torch_pool(tag)
    source = torch.ones(16 * MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for turn in range(2):  # in the second round, a graph keeps the pool
        inside_it, leave = threading.Event(), threading.Event()

        def work(entered: Any = inside_it, end: Any = leave) -> None:
            with torch.cuda.use_mem_pool(pool):
                entered.set()
                end.wait(30)

        thread = threading.Thread(target=work)
        thread.start()
        inside_it.wait(30)
        count = pool.use_count()
        try:
            with raises(memsaver.InvalidStateError) as errors:
                memsaver.pause(tag)
            assert errors[0].tag == tag
            assert pool.use_count() == count
        finally:
            leave.set()
            thread.join()
        memsaver.pause(tag)
        memsaver.resume(tag)
        if turn == 0:
            with torch.cuda.graph(graph, pool=pool.id):
                total = (source * 3).sum()
            assert inside(total, tag) and held(tag) > 0
    graph.replay()
    assert total.item() == 3 * 16 * MIB
    memsaver.pause(tag)
    assert held(tag) == 0
    memsaver.resume(tag)
    graph.replay()
    assert total.item() == 3 * 16 * MIB


def case_torch_pool_of_a_paused_tag(tag: str) -> None:
    """A pool of a paused tag allocates no new memory, and a warning states the reason."""
    pool = memsaver.torch_pool(tag, backup="host")
    with torch.cuda.use_mem_pool(pool):
        tensor = numbered(16)
    memsaver.pause(tag)
    with raises(memsaver.InvalidStateError):
        memsaver.torch_pool(tag)
    with torch.cuda.use_mem_pool(pool):
        with raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memsaver.resume(tag)
    assert any("paused" in str(warning.message) for warning in caught)
    assert is_numbered(tensor)
    with torch.cuda.use_mem_pool(pool):
        assert inside(numbered(256), tag)
