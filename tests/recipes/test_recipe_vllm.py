"""Tests vLLM's own engine core, executor, worker and sleep mode backend with memsaver."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch
from looks import paused_tags

from memsaver.integrations.vllm import plugin, wake_order
from memsaver.integrations.vllm.allocator import MemsaverAllocator

pytestmark = pytest.mark.recipes

MIB = 1 << 20


def weight() -> torch.Tensor:
    return torch.arange(MIB, dtype=torch.float32)


@pytest.mark.parametrize("purpose", ["allocator", "sleep_and_wake_up", "graph_pool"])
def test_the_hooks_attach(vllm_engine, purpose):
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import CuMemAllocator

    if purpose == "allocator":
        assert isinstance(CuMemAllocator.instance, MemsaverAllocator)
        named = sys.modules["vllm.v1.worker.gpu_worker"].get_mem_allocator_instance
        assert named() is get_mem_allocator_instance() is CuMemAllocator.instance
    elif purpose == "sleep_and_wake_up":
        owner = sys.modules["vllm.v1.worker.gpu_worker"].Worker
        assert callable(owner.memsaver_state)
        assert {"sleep", "wake_up"} <= {
            name for name, value in vars(owner).items() if hasattr(value, "__wrapped__")
        }
    else:
        from memsaver.integrations.vllm import graphs

        platform = importlib.import_module("vllm.platforms.interface").Platform
        owner = type("Platform", (platform,), {})
        graphs.install(owner)
        assert hasattr(owner.get_global_graph_pool, "__wrapped__")


def test_discard_releases_a_tag_of_an_engine_that_is_awake(vllm_engine):
    core = vllm_engine.core
    if not hasattr(core.model_executor, "discard"):
        pytest.skip("this version of vLLM has no discard of single tags")
    core.model_executor.discard(("kv_cache",))
    assert paused_tags() == {"kv_cache"}
    core.sleep()
    assert paused_tags() >= {"weights", "kv_cache"}
    core.wake_up()
    assert torch.equal(vllm_engine.runner.model.weight, weight())


def test_another_sleep_mode_backend_sleeps_in_its_own_way(vllm_engine, monkeypatch):
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

    calls = []

    class Backend(SleepModeBackend):
        def suspend(self, level=1):
            calls.append(level)

        def resume(self, tags=None):
            calls.append(tags)

        def state(self):
            raise AssertionError("not used")

        def discard(self, tags):
            raise AssertionError("not used")

    registry = SleepModeBackendFactory._registry | {"other": lambda: Backend}
    monkeypatch.setattr(SleepModeBackendFactory, "_registry", registry)
    core, model_config = vllm_engine.core, vllm_engine.worker.model_config
    model_config.sleep_mode_backend = "other"
    core.sleep(level=1)
    assert core.is_sleeping() and not paused_tags()
    core.wake_up()
    assert not core.is_sleeping() and len(calls) == 2
    assert torch.equal(vllm_engine.runner.model.weight, weight())


def test_a_second_engine_is_refused_and_the_first_lives(vllm_engine):
    from vllm_recipe import worker

    with pytest.raises(AssertionError, match="one instance per process"):
        worker().load_model()
    vllm_engine.core.sleep()
    vllm_engine.core.wake_up()
    assert torch.equal(vllm_engine.runner.model.weight, weight())


def test_the_groups_of_ranks_have_the_expected_names(vllm_engine):
    state = importlib.import_module("vllm.distributed.parallel_state")
    assert {"_WORLD", "_INNER_DP_WORLD", "_TP"} <= set(vars(state))
    assert {"world_size", "cpu_group"} <= set(state.GroupCoordinator.__annotations__)
    transfers = importlib.import_module("vllm.distributed.kv_transfer")
    assert not transfers.has_kv_transfer_group() and callable(transfers.get_kv_transfer_group)
    core = importlib.import_module("vllm.v1.engine.core")
    assert "self.dp_group" in inspect.getsource(core.DPEngineCoreProc)
    clients = importlib.import_module("vllm.v1.engine.core_client")
    assert "engine" in inspect.signature(clients.AsyncMPClient._call_utility_async).parameters
    assert "self.core_engines" in inspect.getsource(clients.MPClient)


def test_the_reset_of_scales_has_the_expected_name(vllm_engine):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner, "post_kv_cache_wake_up"):
        pytest.skip("this version of vLLM has no reset of the KV cache's scales")
    assert callable(getattr(GPUModelRunner, wake_order._RESET))


@pytest.mark.parametrize("value", ["1", "0", "invalid"])
def test_vllm_copies_the_variables_to_rays_workers(vllm_engine, monkeypatch, value):
    ray_env = importlib.import_module("vllm.ray.ray_env")
    own = ray_env.DEFAULT_ENV_VAR_PREFIXES - {"MEMSAVER_"}
    monkeypatch.setattr(ray_env, "DEFAULT_ENV_VAR_PREFIXES", own)
    monkeypatch.setenv("MEMSAVER_VLLM", value)
    monkeypatch.setenv("MEMSAVER_HOST_BYTES", "1GiB")
    assert not {"MEMSAVER_VLLM", "MEMSAVER_HOST_BYTES"} & ray_env.get_env_vars_to_copy()
    plugin.load_plugin()
    assert {"MEMSAVER_VLLM", "MEMSAVER_HOST_BYTES"} <= ray_env.get_env_vars_to_copy()
    second = importlib.import_module("vllm.v1.executor.ray_env_utils").get_driver_env_vars(set())
    assert second["MEMSAVER_VLLM"] == value
