"""A worker of vLLM's Ray executor, on the simulated driver. Ray's processes import this module."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import vllm.platforms
import vllm_recipe
from vllm.v1.executor.ray_utils import RayWorkerWrapper

from memsaver import simulator


class Wrapper(RayWorkerWrapper):
    """vLLM's worker wrapper, which creates the recipes' worker."""

    def __init__(self, rpc_rank: int) -> None:
        super().__init__(rpc_rank=rpc_rank)
        vllm.platforms._current_platform = vllm_recipe.SimulatedCuda()

    def init_worker(self, all_kwargs) -> None:
        given = all_kwargs[self.rpc_rank]
        rank, size = given["rank"], len(all_kwargs)
        vllm_recipe.simulate(pytest.MonkeyPatch())
        dist.init_process_group(
            "gloo", init_method=given["distributed_init_method"], rank=rank, world_size=size
        )
        self.worker = vllm_recipe.worker()
        self.worker.rank, self.vllm_config = rank, self.worker.vllm_config
        self.worker.parallel_config = SimpleNamespace(
            world_size=size, distributed_executor_backend="ray"
        )

    def init_device(self) -> None:
        pass

    def initialize_from_config(self, kv_cache_configs) -> None:
        self.worker.initialize_from_config(vllm_recipe.KV_CACHE_CONFIG)


def is_intact(worker) -> bool:
    weight = torch.arange(vllm_recipe.MIB, dtype=torch.float32)
    return torch.equal(worker.model_runner.model.weight, weight)


def limit_host(worker, nbytes: int, rank: int) -> None:
    if worker.rank == rank:
        simulator.control().sim_host_limit(nbytes)
