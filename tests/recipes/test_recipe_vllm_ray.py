"""Tests vLLM's own Ray executor with Ray's processes, on the simulated driver."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from repository import TESTS

import memsaver

pytestmark = pytest.mark.recipes

RANKS = 2


@pytest.fixture
def ray(monkeypatch):
    """Start Ray with simulated GPUs."""
    pytest.importorskip("vllm")
    ray = pytest.importorskip("ray")
    paths = [str(TESTS / "support"), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=RANKS,
        num_gpus=RANKS,
        include_dashboard=False,
        object_store_memory=80 << 20,
        logging_level="warning",
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def core(ray, sim, monkeypatch):
    """Yield an engine core whose workers run in Ray's processes and have a model and a KV cache."""
    try:
        from vllm.v1.executor import ray_executor
    except ImportError:
        pytest.skip("this version of vLLM has no Ray executor without message queues")
    import vllm_recipe
    from ray.util import placement_group
    from vllm_ray_worker import Wrapper

    vllm_recipe.simulate(monkeypatch)
    monkeypatch.setattr(ray_executor, "current_platform", vllm_recipe.SimulatedCuda())
    monkeypatch.setattr(ray_executor, "RayWorkerWrapper", Wrapper)
    monkeypatch.setenv("MEMSAVER_VLLM_ASLEEP", "wait")  # Ray's processes do not inherit it
    executor = ray_executor.RayDistributedExecutor.__new__(ray_executor.RayDistributedExecutor)
    executor.vllm_config = None
    executor.parallel_config = SimpleNamespace(
        world_size=RANKS,
        tensor_parallel_size=RANKS,
        pipeline_parallel_size=1,
        ray_workers_use_nsight=False,
    )
    group = placement_group([{"GPU": 1}] * RANKS)
    ray.get(group.ready(), timeout=60)
    executor._init_workers_ray(group)
    executor.collective_rpc("initialize_from_config", args=([vllm_recipe.KV_CACHE_CONFIG] * RANKS,))
    yield vllm_recipe.core_with(executor)
    for actor in executor.workers:
        ray.kill(actor)


def released(core) -> list[tuple[str, ...]]:
    return [tuple(row["released"]) for row in core.collective_rpc("memsaver_state")]


def test_rays_workers_sleep_on_all_ranks_or_none(core):
    from vllm_ray_worker import is_intact, limit_host

    states = core.collective_rpc("memsaver_state")
    assert [row["when_asleep"] for row in states] == ["wait"] * RANKS
    core.collective_rpc(limit_host, args=(1 << 16, 1))
    with pytest.raises(memsaver.OutOfHostMemoryError, match="rank 1 of 2"):
        core.sleep()
    assert released(core) == [()] * RANKS and not core.is_sleeping()
    core.collective_rpc(limit_host, args=(1 << 30, 1))
    for _ in range(2):
        core.sleep()
        assert released(core) == [("kv_cache", "weights")] * RANKS
        for tag, rest in (("weights", ("kv_cache",)), ("kv_cache", ())):
            core.wake_up([tag])
            assert released(core) == [rest] * RANKS
        assert core.collective_rpc(is_intact) == [True] * RANKS
    assert not core.is_sleeping()
