"""Tests memsaver's adapter with LightRFT's own strategy classes, if LightRFT is installed."""

from __future__ import annotations

from types import SimpleNamespace

import absent_packages
import pytest
from installed import needs

from memsaver.integrations.lightrft import adapt
from memsaver.integrations.lightrft.adapter import _METHODS

pytestmark = pytest.mark.recipes


@pytest.fixture(scope="module", autouse=True)
def lightrft():
    absent_packages.install()  # before transformers is imported, which looks for them once
    with pytest.MonkeyPatch.context() as patch:  # its strategies ask for the GPU when imported
        patch.setattr("torch.cuda.current_device", lambda: 0)
        needs("lightrft.strategy.strategy_base", "that on PyPI, 0.1.0, has no strategies")


@pytest.fixture
def strategy():
    """Return a strategy without its distributed startup, which requires GPUs."""
    from lightrft.strategy.strategy_base import EngineStatus, StrategyBase

    class Strategy(StrategyBase):
        sync_and_clear_cache = staticmethod(lambda: None)
        print = staticmethod(lambda *_: None)

    Strategy.__abstractmethods__ = frozenset()
    strategy = object.__new__(Strategy)
    strategy.args = SimpleNamespace(enable_engine_sleep=True, adam_offload=True)
    strategy.inference_engine = None
    strategy.inference_engine_status = EngineStatus.SLEEPED
    strategy.broadcast_manager = None
    return strategy


def test_its_strategies_have_the_replaced_methods():
    from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy
    from lightrft.strategy.strategy_base import EngineStatus, StrategyBase

    for owner in (StrategyBase, FSDPV2Strategy):
        assert [name for name in _METHODS if not hasattr(owner, name)] == []
    assert {status.name for status in EngineStatus} >= {"SLEEPED", "WAKEUP"}


def test_a_step_of_its_own_order(engine, strategy):
    """During LightRFT's `update_engine_weights`, weights are mapped and the KV cache is paused."""
    import memsaver
    from memsaver.integrations.sglang import SleepController

    seen = []
    strategy.inference_engine_type = "sglang"
    strategy.inference_engine = SimpleNamespace(_tp_rank=0, _engine=engine.url)
    memory = adapt(strategy, timeout=30)
    strategy.inference_engine_status = type(strategy.inference_engine_status).WAKEUP
    strategy.maybe_sleep_inference_engine()
    strategy.broadcast_manager = SimpleNamespace(
        broadcast_to_engine=lambda: seen.append(memsaver.state("kv_cache"))
    )
    strategy.update_engine_weights(actor=None)
    assert seen == ["paused"] and memsaver.state("kv_cache") == "paused"
    strategy.wakeup_inference_engine()
    assert SleepController(engine.url).status == "awake" == memory.status
    memory.close()


def test_its_optimizer_methods_do_something(sim, tag, strategy):
    torch = pytest.importorskip("torch")
    name = tag("optimizer")
    memory = adapt(strategy, tag=name)
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    strategy.maybe_offload_optimizer(optimizer)
    assert sim.tag_bytes() == 0
    strategy.maybe_load_optimizer(optimizer)
    optimizer.step()
    memory.close()
