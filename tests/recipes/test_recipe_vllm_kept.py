"""Tests that vLLM's memory other than weights and KV cache survives sleeps, with vLLM's own
modules.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import vllm_kv_caches
from looks import paused_tags

import memsaver
from memsaver import simulator

pytestmark = pytest.mark.recipes

MIB = 1 << 20
ORDERS = [("weights", "kv_cache"), ("kv_cache", "weights")]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_tags_wake_up_in_any_order(start_vllm, order, level):
    """Adapters survive; at level 2, the buffers of the model and of a draft model also survive."""
    engine = start_vllm(has_lora=True, has_draft=True)
    core, models = engine.core, (engine.runner.model, engine.runner.draft)
    stack = engine.runner.lora_manager.stack.fill_(3)
    contents = torch.arange(MIB, dtype=torch.float32)
    for _ in range(2):
        core.sleep(level)
        assert paused_tags() == {"weights", "kv_cache", "runtime"}
        saved = [row.backup_bytes for row in memsaver.stats().tags if row.tag == "weights"]
        assert any(saved) == (level == 1)
        core.wake_up([order[0]])
        assert paused_tags() == {order[1]} and core.is_sleeping()
        core.wake_up([order[1]])
        assert not paused_tags() and not core.is_sleeping()
        assert (stack == 3).all()
        for model in models:
            assert torch.equal(model.cos_sin_cache, torch.arange(64.0))
            assert torch.equal(model.weight, contents) == (level == 1)
            model.weight.copy_(contents)  # as a reload


def test_a_level_2_sleep_that_fails_saves_nothing_of_a_draft_model(sim, start_vllm):
    engine = start_vllm(has_draft=True, has_lora=True)
    sim.host_limit(1 << 16)
    with pytest.raises(memsaver.OutOfHostMemoryError):
        engine.core.sleep(level=2)
    sim.host_limit()
    engine.runner.draft.cos_sin_cache.fill_(5)
    engine.core.sleep(level=1)
    engine.core.wake_up()
    assert (engine.runner.draft.cos_sin_cache == 5).all()


@pytest.mark.parametrize("function", vllm_kv_caches.ALL)
@pytest.mark.parametrize("level", [1, 2])
def test_state_that_is_created_with_the_kv_cache_survives(start_vllm, monkeypatch, level, function):
    monkeypatch.setattr("vllm_recipe.Runner.allocates", staticmethod(function))
    engine = start_vllm()
    rows = {row.tag: row for row in memsaver.stats().tags}
    assert rows["kv_cache"].resident_bytes == vllm_kv_caches.KV_CACHE
    if "runtime" not in rows or not rows["runtime"].resident_bytes:
        assert not vllm_kv_caches.exist()
        pytest.skip("this version of vLLM has no pool for runtime state")
    for tag in ("weights", "kv_cache"):
        engine.core.sleep(level)
        rows = {row.tag: row for row in memsaver.stats().tags}
        assert not any(row.resident_bytes for row in rows.values())
        assert rows["kv_cache"].backup_bytes == 0 < rows["runtime"].backup_bytes
        engine.core.wake_up([tag])
        assert torch.equal(engine.runner.positions, torch.arange(64.0))
        engine.core.wake_up()


class OnDevice(torch.nn.Parameter):
    """A parameter that leaves the simulated memory when it is copied to the host, as on a GPU."""

    is_cpu = False

    def detach(self):
        return super().detach().clone()


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_that_vllm_preserves_survive_level_2(start_vllm, order):
    engine = start_vllm(has_draft=True)
    if "_sleep_saved_parameters" not in vars(engine.worker):
        pytest.skip("this version of vLLM has no sleep_preserve_parameter_names")
    model, draft = engine.runner.model, engine.runner.draft
    model.weight = OnDevice(model.weight.data, requires_grad=False)
    engine.worker.model_config.sleep_preserve_parameter_names = ("weight",)
    engine.core.sleep(level=2)
    for tag in order:
        engine.core.wake_up([tag])
    assert torch.equal(model.weight, torch.arange(MIB, dtype=torch.float32))
    assert not draft.weight.any()


def test_graphs_that_vllm_offloads_survive_level_2(start_vllm, monkeypatch):
    try:
        capture_pool = importlib.import_module("vllm.compilation.cudagraph_pool").capture_pool
    except ImportError:
        pytest.skip("this version of vLLM has no sleep_mode_offload_cudagraph")
    config = importlib.import_module("vllm.config").VllmConfig
    engine = start_vllm()
    engine.worker.model_config.sleep_mode_offload_cudagraph = True
    compilation = SimpleNamespace(cudagraph_mode=None)
    made = SimpleNamespace(model_config=engine.worker.model_config, compilation_config=compilation)
    made.use_cumem_cudagraph_pool = config.use_cumem_cudagraph_pool.fget(made)
    monkeypatch.setattr(memsaver, "torch_pool", lambda *_, **__: SimpleNamespace(id=(0, 7)))
    with capture_pool(None, made) as pool, memsaver.region("cuda_graph", backup="host"):
        graph = simulator.empty(64).fill_(3)
    allocator = importlib.import_module("vllm.distributed.device_communicators.pynccl_allocator")
    assert pool == allocator._graph_pool_id == (0, 7)
    engine.core.sleep(level=2)
    assert "cuda_graph" in paused_tags()
    engine.core.wake_up(["kv_cache"])
    assert paused_tags() == {"weights"} and (graph == 3).all()


def test_workspaces_are_released_without_a_backup(start_vllm, monkeypatch):
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    engine = start_vllm()
    try:
        manager = workspace.WorkspaceManager(
            torch.device("cpu"),
            alloc_context=lambda: engine.worker._maybe_get_memory_pool_context("workspace"),
        )
    except TypeError:
        pytest.skip("this version of vLLM has no pool for workspaces")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "empty", lambda size, dtype, device: simulator.empty(size[0], dtype=dtype)
        )
        (tensor,) = manager.get_simultaneous(((MIB,), torch.uint8))
    assert [nbytes for _, nbytes in memsaver.ranges("workspace")]
    engine.core.sleep(level=1)
    (row,) = [row for row in memsaver.stats().tags if row.tag == "workspace"]
    assert row.state == "paused" and not row.backup_bytes
    engine.core.wake_up(["kv_cache"])
    assert paused_tags() == {"weights"}
    tensor.fill_(1)


def test_release_of_the_kv_cache_memory_keeps_everything_else(start_vllm):
    engine = start_vllm(has_lora=True, has_draft=True)
    if not hasattr(engine.core, "release_kv_cache_memory"):
        pytest.skip("this version of vLLM has no release_kv_cache_memory")
    with pytest.raises(RuntimeError, match="completed pause"):
        engine.core.release_kv_cache_memory()
    engine.core.pause_scheduler()
    engine.core.release_kv_cache_memory()
    assert paused_tags() == {"kv_cache"} and engine.core.is_sleeping()
    with pytest.raises(RuntimeError, match="resident"):
        engine.core.release_kv_cache_memory()
    engine.core.wake_up(["kv_cache"])
    assert not paused_tags() and not engine.core.is_sleeping()
    assert engine.runner.draft.weight.any()
