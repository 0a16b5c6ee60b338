"""Tests LightRFT's strategy interface with memsaver on four ranks, two of which have an engine."""

import distributed_ranks
import pytest

pytest.importorskip("torch")

RANKS = """
import pytest
import fake_sglang as engines
import scheduler_calls
from fake_lightrft import EngineStatus, Rollout, Sender, Strategy
from trainers import Trainer, step_all, zero_grad_all
from memsaver.integrations.lightrft import adapt
from memsaver.integrations.sglang import hooks

begin("gloo")
sim.start()


def said(text):
    return text if tp_rank == 0 else None


def refused_in_a_second(call, *arguments):
    memory._engine._timeout = 1
    error = refused(call, *arguments)
    memory._engine._timeout = 30
    return error


with pytest.MonkeyPatch.context() as patch, engines.modules(patch) as classes:
    hooks.install()
    engine = scheduler = None
    tp_rank = RANK % 2  # two groups, whose first ranks have an engine each
    if tp_rank == 0:
        scheduler = classes.Scheduler(classes.Updater)
        scheduler_calls.hold(scheduler, blocks)
        engine = engines.Engine(classes.Tokenizer([scheduler]))
    strategy = Strategy()
    memory = adapt(strategy, timeout=30)
    strategy.setup_inference_engine(Rollout(engine, tp_rank), actor=Sender(strategy, scheduler))
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    assert memory.status == said("weights_only")

    # One engine lacks memory: every rank raises the error, and all continue when there is some.
    with full(2):
        error = refused(strategy.gather_and_generate, "a")
    assert set(error.failures) == {2} and error.failures[2].kind == "OutOfDeviceMemoryError"
    assert "rank 2 of 4" in str(error)
    assert strategy.gather_and_generate("a") == said("a!")

    # One engine has a request in flight, while the others sleep.
    strategy.wakeup_inference_engine()
    if RANK == 0:
        scheduler.begin("somebody else's")
    error = refused_in_a_second(strategy.maybe_sleep_inference_engine)
    assert set(error.failures) == {0} and error.failures[0].kind == "EngineBusyError"
    if RANK == 0:
        scheduler.end("somebody else's")
    assert strategy.gather_and_generate("b") == said("b!")

    # Of engines that lose their weights during a sleep, one is busy: all get them again, once.
    memory.close()
    memory = adapt(strategy, timeout=30, weights="resend")
    strategy.broadcast_manager = sender = Sender(strategy, scheduler)
    strategy.wakeup_inference_engine()
    assert sender.states == []
    if tp_rank == 0:
        scheduler.begin("somebody else's")
    refused_in_a_second(strategy.maybe_sleep_inference_engine)  # on both, and nothing is lost
    strategy.wakeup_inference_engine()
    assert sender.states == []
    if RANK == 2:
        scheduler.end("somebody else's")
    error = refused_in_a_second(strategy.maybe_sleep_inference_engine)
    assert set(error.failures) == {0}
    strategy.wakeup_inference_engine()
    assert len(sender.states) == (1 if tp_rank == 0 else 0)
    if RANK == 0:
        scheduler.end("somebody else's")
    assert strategy.gather_and_generate("c") == said("c!")

    # Optimizers: all ranks or none.
    trainer, expected = Trainer(), Trainer()
    step_all(trainer, expected)
    zero_grad_all(trainer, expected)
    with full(1):
        error = refused(strategy.maybe_offload_optimizer, trainer.optimizer)
    assert set(error.failures) == {1}
    strategy.maybe_offload_optimizer(trainer.optimizer)
    assert memsaver.state("optimizer") == "paused"
    with full(3):
        error = refused(strategy.maybe_load_optimizer, trainer.optimizer)
    assert set(error.failures) == {3} and memsaver.state("optimizer") == "paused"
    strategy.maybe_load_optimizer(trainer.optimizer)
    step_all(trainer, expected)
    assert trainer.contents() == expected.contents()
    # One rank has no optimizer; the next call gives all ranks the same tag.
    another = Trainer()
    another.step()
    for odd in (None, [], 5, object()):
        error = refused(strategy.maybe_offload_optimizer, odd if RANK == 2 else another.optimizer)
        assert set(error.failures) == {2} and error.failures[2].kind == "ConfigError", error
    strategy.maybe_offload_optimizer(another.optimizer)
    assert memsaver.state("optimizer 2") == "paused"
    strategy.maybe_load_optimizer(another.optimizer)
    memory.close()
    if engine is not None:
        scheduler_calls.let_go(scheduler)
        engine.shutdown()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_failure_of_one_rank_is_an_error_on_all(tmp_path):
    distributed_ranks.run(tmp_path, RANKS, 4, timeout=100)
