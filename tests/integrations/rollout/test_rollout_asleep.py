"""Tests `RolloutEngine` calls on a sleeping SGLang under each policy for requests.

The fake SGLang has memsaver's hooks and uses memory on the simulated driver.
"""

import contextlib
import sys
import types

import fake_sglang
import pytest
import scheduler_calls
import torch
from sleeping_manager import choose
from tasks import Task

from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.sglang import hooks

pytestmark = pytest.mark.usefixtures("tensors_in_files")


@pytest.fixture
def make_engine(monkeypatch, sim, tag, make_blocks):
    """Create a rollout engine, a second client for it, and the fake's tokenizer manager."""
    with contextlib.ExitStack() as cleanup:

        def make(kind: str):
            classes = cleanup.enter_context(fake_sglang.modules(monkeypatch))
            module = types.ModuleType("sglang.srt.managers.tokenizer_manager")
            module.TokenizerManager = classes.Tokenizer
            monkeypatch.setitem(sys.modules, module.__name__, module)
            hooks.install()
            tag.names.extend(fake_sglang.TAGS)
            scheduler = classes.Scheduler(classes.Updater)
            scheduler_calls.hold(scheduler, make_blocks)
            cleanup.callback(scheduler_calls.let_go, scheduler)
            manager = classes.Tokenizer([scheduler])
            manager.server_args.enable_memory_saver = True
            manager.server_args.enable_weights_cpu_backup = True
            engine = (fake_sglang.Engine if kind == "local" else fake_sglang.Server)(manager)
            cleanup.callback(engine.shutdown)
            made = RolloutEngine.connect(engine if kind == "local" else engine.url, timeout=30)
            return made, RolloutEngine.connect(made.backend.link, timeout=30), manager

        yield make


def generate(engine):
    return engine.generate([[10]], {"max_new_tokens": 2}).token_ids.tolist()


def update(engine):
    return engine.update_weights({"w": torch.zeros(4)}, verify="off").tensors


@pytest.mark.parametrize("kind", ["local", "server"])
@pytest.mark.parametrize("when", ["refuse", "wait", "wake"])
@pytest.mark.parametrize(
    "call, result, still", [(generate, [[10, 11]], Status.AWAKE), (update, 1, Status.WEIGHTS_ONLY)]
)
def test_a_call_on_a_sleeping_engine_follows_the_policy(
    make_engine, monkeypatch, sim, kind, when, call, result, still
):
    choose(monkeypatch, when, seconds=30)
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    engine, other, manager = make_engine(kind)
    full = sim.tag_bytes()
    assert call(engine) == result
    engine.sleep()
    assert sim.tag_bytes() == 0
    if when == "refuse":
        with pytest.raises(EngineAsleepError):
            call(engine)
        assert engine.refresh() is Status.ASLEEP
    elif when == "wait":
        task = Task(call, engine)
        task.join(0.3)
        assert task.is_alive() and sim.tag_bytes() == 0
        other.wake_up(None if call is generate else "weights")
        assert task.result(30) == result and engine.refresh() is still
    else:
        assert call(engine) == result and engine.refresh() is still
    engine.wake_up()
    assert sim.tag_bytes() == full and generate(engine) == [[10, 11]]
    assert manager.schedulers[0].model.is_intact()
