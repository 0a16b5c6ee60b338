"""The part of a vLLM engine that sleeps and wakes up, on the simulated driver.

The engine uses vLLM's own plugin system, engine core, executor, worker, sleep mode backend and
graph pool. vLLM finds memsaver through the plugin system. Parts that need a GPU are missing. The
model and the KV cache are CPU tensors in simulated memory, and the engine generates no output.
"""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import ClassVar

import torch
import vllm.platforms
import vllm_kv_caches
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.plugins import load_general_plugins
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import gpu_worker, lora_model_runner_mixin
from vllm.v1.worker.worker_base import WorkerWrapperBase

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

MIB = 1 << 20
KV_CACHE_CONFIG = vllm_kv_caches.config()
SAVED = ("_sleep_saved_buffers", "_sleep_saved_parameters", "_sleep_saved_draft_buffers")


class SimulatedCuda(Platform):
    """The simulated driver in the form of a vLLM platform."""

    _enum = PlatformEnum.CUDA
    device_type = "cpu"
    ray_device_key = "GPU"

    @classmethod
    def graph_pool_handle(cls):
        return (0, 1)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config) -> None:
        pass


class Model(torch.nn.Module):
    """A model with a weight and a buffer, allocated in the open pool."""

    embedding_modules: ClassVar = {}  # for LoRA

    def __init__(self) -> None:
        super().__init__()
        weight = simulator.empty(MIB)
        temporary = simulator.empty(MIB)
        weight.copy_(temporary.copy_(torch.arange(MIB)))
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("cos_sin_cache", simulator.empty(64).copy_(torch.arange(64.0)))


class Adapters:
    """The manager of LoRA adapters, whose stacked tensors are not buffers of the model."""

    def __init__(self, *_) -> None:
        pass

    def create_lora_manager(self, model, vllm_config):
        self.stack = simulator.empty(64).zero_()
        return model


class Runner(lora_model_runner_mixin.LoRAModelRunnerMixin):
    """The parts of a model runner that allocate memory.

    Attributes:
        allocates: vLLM's function that allocates the KV cache.
    """

    allocates = staticmethod(vllm_kv_caches.of_v2_runner)

    def __init__(self, vllm_config, has_lora: bool, has_draft: bool) -> None:
        self.vllm_config, self.has_lora, self.has_draft = vllm_config, has_lora, has_draft

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model = Model()
        if self.has_lora:
            self.model = self.load_lora_model(self.model, self.vllm_config, "cpu")
        self.draft = Model() if self.has_draft else None

    def get_draft_model(self):
        return self.draft

    def initialize_kv_cache(self, kv_cache_config, kv_cache_allocation_context=None) -> None:
        # Outside of the pools in some versions.
        allocate = simulator.empty if _C.region_depth() else torch.empty
        self.block_tables = allocate(64, dtype=torch.int32).zero_()
        self.positions = allocate(64).copy_(torch.arange(64.0))
        with kv_cache_allocation_context or contextlib.nullcontext():
            self.kv_cache = vllm_kv_caches.allocate(self.allocates, kv_cache_config)

    def post_kv_cache_wake_up(self) -> None:  # 0.26
        self.block_tables.zero_()

    def get_model(self):
        return self.model

    def shutdown(self) -> None:
        self.model = self.draft = self.lora_manager = self.kv_cache = None
        self.block_tables = self.positions = None


def simulate(patch) -> None:
    """Make vLLM's modules use the simulated driver until the patch is undone."""
    patch.setattr(vllm.platforms, "_current_platform", SimulatedCuda())
    for module in (vllm.platforms, gpu_worker, lora_model_runner_mixin, *device_modules()):
        patch.setattr(module, "current_platform", SimulatedCuda(), raising=False)
    patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    patch.setattr(torch.accelerator, "get_memory_info", lambda *_: memsaver.device_memory(0))
    patch.setattr(gpu_worker.Worker, "synchronize_device", lambda _: None, raising=False)
    patch.setattr(gpu_worker, "set_current_vllm_config", lambda _: contextlib.nullcontext())
    patch.setattr(
        gpu_worker.Worker,
        "_scoped_allocator_max_split",
        lambda *_, **__: contextlib.nullcontext(),
    )
    patch.setattr(gpu_worker, "ensure_kv_transfer_initialized", lambda *_: None)
    patch.setattr(lora_model_runner_mixin, "supports_lora", lambda _: True)
    patch.setattr(lora_model_runner_mixin, "LRUCacheWorkerLoRAManager", Adapters)
    load_general_plugins()


def core_with(executor) -> EngineCore:
    """Return vLLM's engine core with an executor whose workers have a model."""
    executor.sleeping_tags = set()
    if not isinstance(getattr(type(executor), "is_sleeping", None), property):
        executor.is_sleeping = False  # 0.26
    core = EngineCore.__new__(EngineCore)
    core.model_executor = executor
    core.scheduler = Scheduler()
    core.batch_queue = None
    core._reset_caches = lambda *_, **__: None
    return core


class Engine:
    """vLLM's engine core with its executor and worker."""

    def __init__(self, patch, has_lora: bool = False, has_draft: bool = False) -> None:
        # Restored after the test, because other tests use the platform of this machine.
        simulate(patch)
        self.worker = worker(has_lora, has_draft)
        executor = UniProcExecutor.__new__(UniProcExecutor)
        executor.driver_worker = WorkerWrapperBase.__new__(WorkerWrapperBase)
        executor.driver_worker.worker = self.worker
        self.core = core_with(executor)
        self.core.vllm_config = self.worker.vllm_config
        self.worker.load_model()
        self.worker.initialize_from_config(KV_CACHE_CONFIG)

    @property
    def runner(self) -> Runner:
        return self.worker.model_runner

    def close(self) -> None:
        self.worker.model_runner.shutdown()
        vars(self.worker).clear()  # a logged traceback may refer to the worker


class Scheduler:
    """A scheduler without requests."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.pause_state = PauseState.UNPAUSED
        self.running: list = []
        self.requests: dict = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    has_requests = has_unfinished_requests

    def reset_encoder_cache(self) -> None:
        pass

    def reset_prefix_cache(self, *_) -> bool:
        return True

    def finish_requests(self, *_) -> list:
        return []

    def get_kv_connector(self) -> None:
        return None

    def set_pause_state(self, state) -> None:
        self.pause_state = state


def worker(has_lora: bool = False, has_draft: bool = False):
    """Return vLLM's worker with the attributes that a sleep uses."""
    model_config = SimpleNamespace(
        enable_cumem_allocator=True,
        enable_sleep_mode=True,
        sleep_mode_backend="cumem",
        enable_return_routed_experts=False,
        enable_nccl_comm_suspend=False,
        sleep_preserve_parameter_names=(),
    )
    vllm_config = SimpleNamespace(
        model_config=model_config, weight_transfer_config=None, ec_transfer_config=None
    )
    found = gpu_worker.Worker.__new__(gpu_worker.Worker)
    created = inspect.getsource(gpu_worker.Worker.__init__)
    vars(found).update((name, {}) for name in SAVED if name in created)
    vars(found).update(
        vllm_config=vllm_config,
        model_config=model_config,
        parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend="uni"),
        cache_config=SimpleNamespace(),
        model_runner=Runner(vllm_config, has_lora, has_draft),
        device=torch.device("cpu"),
        rank=0,
        _sleep_mode_backend=None,
        _sleep_rebuild_draft_metadata_buffers=False,
    )
    return found


def device_modules() -> list:
    """Return the modules that have imported the platform object by name."""
    import vllm.device_allocator
    from vllm.device_allocator import cumem

    return [vllm.device_allocator, cumem]
