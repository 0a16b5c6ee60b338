"""Test LightRFT's strategy interface with memsaver on four ranks, two of which have an engine."""

import pytest
import rank_processes

pytest.importorskip("torch")

RANK = """
import contextlib, os
import torch.distributed as dist
import pytest
import fake_sglang as engines
from fake_lightrft import EngineStatus, Rollout, Sender, Strategy
from simulated_driver import Block, Simulator
from trainers import Trainer
import memsaver
from memsaver.distributed import RankError
from memsaver.integrations.lightrft import adapt
from memsaver.integrations.sglang import hooks

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=dist.FileStore("store", size), rank=rank, world_size=size)
sim = Simulator()
sim.start()
MIB = 1 << 20


def raises(call, *arguments):
    # An error that is the same on all ranks.
    with pytest.raises(RankError) as caught:
        call(*arguments)
    everyones = [None] * size
    dist.all_gather_object(everyones, str(caught.value))
    assert len(set(everyones)) == 1, everyones
    return caught.value


with pytest.MonkeyPatch.context() as patch, engines.modules(patch) as classes:
    hooks.install()
    engine = scheduler = None
    tp_rank = rank % 2  # two groups, whose first ranks have an engine each
    if tp_rank == 0:
        scheduler = classes.Scheduler(classes.Updater)
        with memsaver.region("weights", backup="host"):
            scheduler.model = Block(sim, 4 * MIB, 1)
        with memsaver.region("kv_cache", backup="none"):
            scheduler.kv = Block(sim, 8 * MIB, 2)
        with memsaver.region("cuda_graph", backup="host"):
            scheduler.graph = Block(sim, 2 * MIB, 3)
        engine = engines.Engine(classes.Tokenizer([scheduler]))
    strategy = Strategy()
    memory = adapt(strategy, timeout=30)
    strategy.setup_inference_engine(Rollout(engine, tp_rank), actor=Sender(strategy, scheduler))
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    assert memory.status == ("weights_only" if tp_rank == 0 else None)

    # One engine lacks memory: every rank raises the error, and all continue when there is some.
    if rank == 2:
        sim.occupy(memsaver.device_memory(0)[0] - MIB)
    error = raises(strategy.gather_and_generate, "a")
    assert set(error.failures) == {2} and error.failures[2].kind == "OutOfDeviceMemoryError"
    assert "rank 2 of 4" in str(error)
    sim.occupy(0)
    assert strategy.gather_and_generate("a") == ("a!" if tp_rank == 0 else None)

    # One engine has a request in flight, while the others sleep.
    strategy.wakeup_inference_engine()
    if rank == 0:
        scheduler.begin("somebody else's")
    memory._engine._timeout = 1
    error = raises(strategy.maybe_sleep_inference_engine)
    assert set(error.failures) == {0} and error.failures[0].kind == "EngineBusyError"
    memory._engine._timeout = 30
    if rank == 0:
        scheduler.end("somebody else's")
    assert strategy.gather_and_generate("b") == ("b!" if tp_rank == 0 else None)

    # Of engines that lose their weights in a sleep, one is busy: all get them again, once.
    memory.close()
    memory = adapt(strategy, timeout=30, weights="resend")
    strategy.broadcast_manager = sender = Sender(strategy, scheduler)
    strategy.wakeup_inference_engine()
    assert sender.states == []
    if tp_rank == 0:
        scheduler.begin("somebody else's")
    memory._engine._timeout = 1
    raises(strategy.maybe_sleep_inference_engine)  # on both, and nothing is lost
    memory._engine._timeout = 30
    strategy.wakeup_inference_engine()
    assert sender.states == []
    if rank == 2:
        scheduler.end("somebody else's")
    memory._engine._timeout = 1
    error = raises(strategy.maybe_sleep_inference_engine)
    assert set(error.failures) == {0}
    memory._engine._timeout = 30
    strategy.wakeup_inference_engine()
    assert len(sender.states) == (1 if tp_rank == 0 else 0)
    if rank == 0:
        scheduler.end("somebody else's")
    assert strategy.gather_and_generate("c") == ("c!" if tp_rank == 0 else None)

    # Optimizers: all ranks or none.
    trainer, expected = Trainer("adamw"), Trainer("adamw")
    for each in (trainer, expected):
        each.step()
        each.optimizer.zero_grad()
    if rank == 1:
        sim.occupy(memsaver.device_memory(0)[0])
    error = raises(strategy.maybe_offload_optimizer, trainer.optimizer)
    assert set(error.failures) == {1}
    sim.occupy(0)
    strategy.maybe_offload_optimizer(trainer.optimizer)
    assert memsaver.state("optimizer") == "paused"
    if rank == 3:
        sim.occupy(memsaver.device_memory(0)[0])
    error = raises(strategy.maybe_load_optimizer, trainer.optimizer)
    assert set(error.failures) == {3} and memsaver.state("optimizer") == "paused"
    sim.occupy(0)
    strategy.maybe_load_optimizer(trainer.optimizer)
    for each in (trainer, expected):
        each.step()
    assert trainer.contents() == expected.contents()
    # One rank has no optimizer; the next call gives all ranks the same tag.
    another = Trainer("adamw")
    another.step()
    for odd in (None, [], 5, object()):
        error = raises(strategy.maybe_offload_optimizer, odd if rank == 2 else another.optimizer)
        assert set(error.failures) == {2} and error.failures[2].kind == "ConfigError", error
    strategy.maybe_offload_optimizer(another.optimizer)
    assert memsaver.state("optimizer 2") == "paused"
    strategy.maybe_load_optimizer(another.optimizer)
    memory.close()
    if engine is not None:
        assert scheduler.death is None
        engine.shutdown()
        del scheduler.model, scheduler.kv, scheduler.graph
assert sim.violations() == []
dist.barrier()
dist.destroy_process_group()
"""


def test_a_failure_of_one_rank_is_an_error_on_all(tmp_path):
    rank_processes.run(RANK, 4, tmp_path, timeout=100)
