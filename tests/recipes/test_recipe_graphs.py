"""Tests that SGLang's own graph backend finds the pool that a pausable graph is captured into.

SGLang's code runs unmodified, with fakes of torch's pools and captures.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch_captures
from installed import needs_sglang

pytestmark = pytest.mark.recipes

HANDLE = (0, 7)  # the id that SGLang's handle has
STREAM = SimpleNamespace(cuda_stream=0x50)


@pytest.fixture
def pools(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", torch_captures.Graph)
    return torch_captures.install(monkeypatch)


@pytest.fixture
def backend(pools, sim, tag, monkeypatch):
    """Yield SGLang's backend for whole graphs, with memsaver as its memory saver."""
    needs_sglang()
    try:
        from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        pytest.skip("this version of SGLang has no backend for whole graphs")
    from sglang.srt.plugins import load_plugins

    tag.names.append("cuda_graph")
    load_plugins()
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    device = SimpleNamespace(graph_pool_handle=lambda: HANDLE, synchronize=lambda: None)
    group = SimpleNamespace(barrier=lambda: None)
    with get_parallel().override(tp_group=group):
        runner = SimpleNamespace(
            device_module=device,
            model_runner=SimpleNamespace(tp_group=group),
            tp_group=group,
        )
        yield full_cuda_graph_backend.FullCudaGraphBackend(runner, enable_memory_saver=True)
    with contextlib.suppress(ImportError):
        from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool

        set_global_graph_memory_pool(None)


def capture(backend, forward):
    with backend.capture_session(STREAM):
        for key in (1, 2):
            backend.capture_one(key, forward)


def test_symmetric_memory_leaves_the_pool_of_the_capture(backend, pools, monkeypatch):
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    nccl = (9, 0)
    functions = {
        "_cuda_beginAllocateCurrentThreadToPool": pools.enter,
        "_cuda_endAllocateToPool": pools.leave,
        "_cuda_releasePool": lambda *_: None,
    }
    for name, function in functions.items():
        for module in (torch._C, pynccl_allocator):  # older versions import the functions
            monkeypatch.setattr(module, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(pools.capturing))
    symmetric = pynccl_allocator.SymmetricMemoryContext
    monkeypatch.setattr(
        pynccl_allocator, "get_nccl_mem_pool", lambda: SimpleNamespace(id=nccl), raising=True
    )
    monkeypatch.setattr(pynccl_allocator, "_cur_device", 0)
    monkeypatch.setattr(pynccl_allocator, "after_2_8_0", True)
    monkeypatch.setattr(symmetric, "_register_segments_for_comm", lambda _: None, raising=False)
    comm = SimpleNamespace(comm=SimpleNamespace(value=1))

    def forward():
        with symmetric(SimpleNamespace(pynccl_comm=comm, unique_name="tp")):
            assert pools.capturing[-1] == nccl

    capture(backend, forward)
    assert len(pools.captured) == 2 and HANDLE not in pools.captured
    during = [pool for pool in pools.left if pool != nccl]
    assert during == pools.captured
    assert pynccl_allocator._graph_pool_id == HANDLE  # as SGLang has set it


def test_sglang_borrows_from_the_pool_of_the_capture(backend, pools, monkeypatch):
    from sglang.srt.model_executor.runner_utils import pool

    if not hasattr(pool, "graph_pool_borrow_largest_run"):
        pytest.skip("this version of SGLang has no borrowing from the pool of its graphs")
    monkeypatch.setenv("SGLANG_ENABLE_GRAPH_POOL_BORROW", "1")
    monkeypatch.setattr(pool, "is_cuda", lambda: True)

    def snapshot(pool_id, include_traces=True):
        blocks = [{"state": "inactive", "address": 0x1000, "size": 3 << 20}]
        return [{"blocks": blocks}] if pool_id in pools.captured else []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    capture(backend, lambda: None)
    assert set(pools.captured) == {pool.get_global_graph_memory_pool()}
    assert pool.graph_pool_borrow_largest_run() == 3 << 20
    capture(backend, lambda: None)  # graphs captured later share the pool
    assert len(set(pools.captured)) == 1


def test_without_borrowing_sglang_keeps_its_own_pool_for_other_graphs(backend, pools):
    from sglang.srt.model_executor.runner_utils import pool

    capture(backend, lambda: None)
    assert len(set(pools.captured)) == 1
    assert pool.get_global_graph_memory_pool() not in pools.captured
