"""Fixtures for the tests of frameworks, which use each framework's installed packages."""

from __future__ import annotations

import pytest
from installed import needs_sglang


@pytest.fixture
def process_group(tmp_path_factory):
    """Initialize a torch.distributed world that contains only this process, as SGLang's schedulers
    do.

    The world exists for one test, because other tests in this process need an uninitialized
    torch.distributed.
    """
    dist = pytest.importorskip("torch.distributed")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(sim, tag, process_group):
    """Yield an engine whose weights and KV cache are mapped. The engine must survive the test."""
    needs_sglang()
    from recipe_engine import Engine

    tag.names.extend(("weights", "kv_cache", "cuda_graph"))
    engine = Engine(sim)
    yield engine
    engine.close()
    assert engine.scheduler.death is None, repr(engine.scheduler.death)
    del engine.scheduler.weights, engine.scheduler.kv_cache


@pytest.fixture
def start_vllm(sim, tag, monkeypatch):
    """Return a function that starts a vLLM engine with the arguments of `Engine`."""
    pytest.importorskip("vllm.device_allocator.sleep_mode_backend", reason="vLLM is not installed")
    from vllm_recipe import Engine

    tag.names.extend(("weights", "kv_cache", "runtime", "workspace", "cuda_graph"))
    engines = []

    def start(**kinds):
        engines.append(Engine(monkeypatch, **kinds))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def vllm_engine(start_vllm):
    """Return a vLLM engine whose weights and KV cache are mapped."""
    return start_vllm()
