"""Tests that memsaver notifies SGLang of the pool into which a pausable graph is captured."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch_captures

import memsaver
from memsaver.integrations.sglang.adapter import MemsaverAdapter

HANDLE = (0, 7)  # the id of SGLang's own pool
STREAM = SimpleNamespace(cuda_stream=0x50)


@pytest.fixture
def pools(sim, tag, monkeypatch):
    tag.names.append("cuda_graph")
    return torch_captures.install(monkeypatch)


@pytest.fixture
def announced(monkeypatch):
    """Return the fake of SGLang's module for symmetric memory."""
    module = SimpleNamespace(_graph_pool_id=HANDLE)
    module.set_graph_pool_id = lambda pool: setattr(module, "_graph_pool_id", pool)
    name = "sglang.srt.distributed.device_communicators.pynccl_allocator"
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def shared(monkeypatch):
    """Return the fake of SGLang's module for the pool that all graphs share."""
    module = SimpleNamespace(pool=HANDLE, borrows=True)
    module.graph_pool_borrow_enabled = lambda: module.borrows
    module.set_global_graph_memory_pool = lambda pool: setattr(module, "pool", pool)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner_utils.pool", module)
    return module


def capture():
    return MemsaverAdapter().cuda_graph(torch_captures.Graph(), pool=HANDLE, stream=STREAM)


def test_a_graph_yields_the_pool_of_its_capture(pools):
    with memsaver.graph(torch_captures.Graph(), "cuda_graph", pool=HANDLE, stream=STREAM) as pool:
        assert pools.capturing == [pool] and pool != HANDLE


def test_the_pool_is_announced_for_the_capture(pools, announced, shared):
    for _ in range(2):
        with capture():
            assert pools.capturing == [announced._graph_pool_id] != [HANDLE]
        assert announced._graph_pool_id == HANDLE
    assert set(pools.captured) == {shared.pool}


def test_sglang_keeps_its_own_pool_if_it_does_not_borrow(pools, announced, shared):
    shared.borrows = False
    with capture():
        pass
    assert shared.pool == HANDLE


def test_a_failed_capture_leaves_sglangs_own_pool(pools, announced, shared):
    with pytest.raises(ValueError), capture():
        raise ValueError
    assert announced._graph_pool_id == shared.pool == HANDLE


def test_an_sglang_without_such_pools_captures_as_before(pools):
    with capture():
        assert len(pools.capturing) == 1
