"""Test that sleeps keep what vLLM keeps besides the weights, with vLLM's own modules."""

from __future__ import annotations

import pytest
import torch

import memsaver

pytestmark = pytest.mark.recipes

MIB = 1 << 20
ORDERS = [("weights", "kv_cache"), ("kv_cache", "weights")]


@pytest.fixture
def start(sim, tag, monkeypatch):
    """Return a function that starts an engine whose weights and KV cache are mapped."""
    pytest.importorskip("vllm.device_allocator.sleep_mode_backend", reason="vLLM is not installed")
    from vllm_recipe import Engine

    tag.names.extend(("weights", "kv_cache", "runtime", "workspace", "cuda_graph"))
    engines = []

    def call(**kinds):
        engines.append(Engine(monkeypatch, **kinds))
        return engines[-1]

    yield call
    for engine in engines:
        engine.close()


def released() -> set[str]:
    return {row.tag for row in memsaver.stats().tags if row.state == "paused"}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_lora_adapters_survive(start, order, level):
    engine = start(has_lora=True)
    stack = engine.runner.lora_manager.stack.fill_(3)
    for _ in range(2):
        engine.core.sleep(level)
        assert released() == {"weights", "kv_cache", "runtime"}
        for tag in order:
            engine.core.wake_up([tag])
        assert not released() and (stack == 3).all()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_draft_model_survives(start, order, level):
    engine = start(has_draft=True)
    draft, contents = engine.runner.draft, torch.arange(MIB, dtype=torch.float32)
    for _ in range(2):
        engine.core.sleep(level)
        for tag in order:
            engine.core.wake_up([tag])
        assert torch.equal(draft.cos_sin_cache, torch.arange(64.0))
        assert torch.equal(draft.weight, contents) == (level == 1)
        draft.weight.copy_(contents)  # as a reload


def test_a_level_2_sleep_that_fails_saves_nothing_of_a_draft_model(sim, start):
    engine = start(has_draft=True, has_lora=True)
    sim.host_limit(1 << 16)
    with pytest.raises(memsaver.OutOfHostMemoryError):
        engine.core.sleep(level=2)
    sim.host_limit()
    engine.runner.draft.cos_sin_cache.fill_(5)
    engine.core.sleep(level=1)
    engine.core.wake_up()
    assert (engine.runner.draft.cos_sin_cache == 5).all()
