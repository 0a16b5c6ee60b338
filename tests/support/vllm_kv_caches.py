"""vLLM's own functions that allocate the KV cache's tensors, on the simulated driver."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch

from memsaver import simulator

KV_CACHE = 8 << 20
LAYER = "layers.0.attn"
V2 = "vllm.v1.worker.gpu.attn_utils"
CPU = torch.device("cpu")


def config():
    """Return the configuration of a KV cache with one layer."""
    return SimpleNamespace(
        num_blocks=1,
        needs_kv_cache_zeroing=False,
        kv_cache_layout=None,
        hash_block_size=None,
        cache_hit_alignment_tokens=None,
        kv_cache_tensors=[SimpleNamespace(size=KV_CACHE, block_stride=0, shared_by=[LAYER])],
        kv_cache_groups=[SimpleNamespace(layer_names=[LAYER])],
    )


def of_v1_runner(config) -> torch.Tensor:
    """Allocate the tensors as the V1 model runner does."""
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    this = SimpleNamespace(device=CPU, runner_only_attn_layers=())
    return runner._allocate_kv_cache_tensors(this, config)[LAYER]


def of_v1_runner_for_transfers(config) -> torch.Tensor:
    """Allocate the tensors as the V1 model runner does for a connector that prefers one tensor."""
    mixin = importlib.import_module("vllm.v1.worker.kv_connector_model_runner_mixin")
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = specs.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.half)
    backend = SimpleNamespace(get_kv_cache_shape=lambda *sizes, cache_dtype_str: (2, *sizes))
    group = SimpleNamespace(kv_cache_spec=spec, backend=backend)
    allocate = mixin.KVConnectorModelRunnerMixin.allocate_uniform_kv_caches
    return allocate(config, [[group]], "auto", CPU, [spec.block_size])[1]


def of_v2_runner(config) -> torch.Tensor:
    """Allocate the tensors as the V2 model runner does."""
    return importlib.import_module(V2)._allocate_kv_cache(config, {}, CPU)[LAYER]


ALL = (of_v1_runner, of_v1_runner_for_transfers, of_v2_runner)


def exist() -> bool:
    """Return whether vLLM has these functions. vLLM has them up to version 0.28."""
    return hasattr(importlib.import_module(V2), "_allocate_kv_cache")


def allocate(function: Callable, config) -> torch.Tensor:
    """Allocate the KV cache in the open pools, with `function` if vLLM has this function."""

    def zeros(size, dtype, device):
        return simulator.empty(size, dtype).zero_()

    if not exist():
        return simulator.empty(KV_CACHE, torch.int8)
    with mock.patch.object(torch, "zeros", zeros):
        return function(config)
