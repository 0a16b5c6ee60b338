"""Tests `RolloutEngine` and `ColocatedSession` with fake vLLM engines."""

from __future__ import annotations

import textwrap

import pytest
import rank_processes
from repository import TESTS

START = """
import datetime, os, signal, sys, time
import pytest, torch
import torch.distributed as dist
import vllm_calls
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RolloutEngine, WeightGroup, WeightMismatchError
torch.multiprocessing.set_sharing_strategy("file_system")

def weights(seed):
    from vllm.model_executor.models.tiny import checkpoint
    return checkpoint(seed)

def in_region(tag, tensors):
    import memsaver
    from memsaver import simulator
    with memsaver.region(tag, backup="host", shareable=True):
        return {n: simulator.empty(t.shape, t.dtype).copy_(t) for n, t in tensors.items()}

def holds(engine, seed, converts=False):
    rows = engine.backend.link.rpc(vllm_calls.holds, (seed, converts), 30)
    assert len(set(rows)) == 1, rows
    return rows[0]

def generated(engine):
    return engine.generate([[1, 2], [3]], {"max_tokens": 4}).token_ids.tolist()
"""
ALONE = """
engine = RolloutEngine.launch(
    kind="vllm", timeout=60, model=MODEL, distributed_executor_backend="uni"
)
"""


@pytest.fixture
def run(run_vllm):
    """Run lines with a one-rank rollout engine whose process is forked from this one.

    `test_two_ranks_share_an_engine` spawns its engine instead, which takes seconds longer.
    """

    def run(lines, model="tiny"):
        code = START + ALONE.replace("MODEL", repr(model))
        run_vllm(f"{code}\n{textwrap.dedent(lines)}\nengine.close()", VLLM_FAKE_START="fork")

    return run


def test_an_engine_is_started_slept_updated_and_ended(run):
    run(
        """
    assert "sglang" not in sys.modules
    assert engine.tp_size == 1 and engine.status is Status.AWAKE
    engine.update_weights(weights(1), version="one")
    first = generated(engine)
    engine.sleep(wait_idle=True)
    assert engine.status is Status.ASLEEP
    with pytest.raises(InvalidStateError):
        generated(engine)
    with engine.staged_wake():
        report = engine.update_weights(weights(2), version="two", bucket_bytes=600, verify="full")
    assert report.buckets > 2 and report.received == report.held == report.tensors == 9
    assert not report.unverified and holds(engine, 2)
    output = engine.generate([[1, 2], [3]], {"max_tokens": 4, "n": 2, "seed": 5})
    assert output.weight_version == "two" and output.prompt_index.tolist() == [0, 0, 1, 1]
    assert output.token_ids.tolist()[::2] != first
    engine.update_weights(weights(1), version="one", pause="retract")
    assert generated(engine) == first
    [process] = engine.backend.link.engine.engine_core.resources.engine_manager.processes
    engine.close()
    assert not process.is_alive()
    """
    )


def test_weights_that_vllm_converts_are_loaded_in_buckets(run):
    run(
        """
    for seed in (1, 2):
        report = engine.update_weights(weights(seed), bucket_bytes=600, verify="full")
        assert report.received == report.tensors == 9 and report.held == 0
        assert "converts" in report.unverified and holds(engine, seed, True)
    """,
        model="tiny-converted",
    )


@pytest.mark.parametrize("model", ["tiny", "tiny-converted"])
def test_the_engines_process_maps_the_trainers_region(run, model):
    """The trainer can immediately pause its tag, and change or free its tensors.

    A model whose weights vLLM converts receives buckets because its loads might write to them.
    """
    run(
        """
    import memsaver
    from memsaver._runtime.native import _C
    memsaver.configure(importer_seconds=10)
    converts = MODEL == "tiny-converted"
    state = in_region("trainer", weights(1))
    for seed in (1, 2, 3):
        report = engine.update_weights(state, verify="full", version=str(seed))
        assert report.mapped == report.held == (0 if converts else 9)
        assert report.received == 9 and report.buckets == converts
        memsaver.pause("trainer")
        memsaver.resume("trainer")
        for name, tensor in weights(seed + 1).items():
            state[name].copy_(tensor)
        assert holds(engine, seed, converts)
    with pytest.raises(EngineError, match="no module or parameter named 'absent.weight'"):
        engine.update_weights({**state, **in_region("trainer", {"absent.weight": torch.ones(2)})})
    memsaver.pause("trainer")
    with pytest.raises(InvalidStateError):
        engine.update_weights(state)
    memsaver.resume("trainer")
    engine.update_weights(state)
    assert holds(engine, 4, converts)
    del state, tensor
    while _C.stats("trainer")[0]["allocations"]:
        time.sleep(0.01)
    """.replace("MODEL", repr(model)),
        model=model,
    )


def test_a_bucket_that_arrives_damaged_is_not_loaded(run):
    run("""
    engine.update_weights(weights(1))
    engine.backend.link.rpc(vllm_calls.hurt_next_bucket, (0,), 30)
    with pytest.raises(WeightMismatchError) as caught:
        engine.update_weights(weights(2), verify="full")
    assert len(caught.value.tensors) == 9 and holds(engine, 1)
    with pytest.raises(EngineError, match="no module or parameter named 'absent.weight'"):
        engine.update_weights({"absent.weight": torch.ones(2)})
    with pytest.raises(WeightMismatchError):
        engine.update_weights({"ignored.weight": torch.ones(2)})
    assert holds(engine, 1)
    engine.update_weights(weights(2), verify="full")
    assert holds(engine, 2)
    """)


def test_weights_arrive_through_a_process_group(run):
    run("""
    with WeightGroup(engine, backend="gloo", timeout=30) as group:
        report = engine.update_weights(weights(2), group=group, bucket_bytes=600, verify="full")
        assert report.received == report.held == 9 and holds(engine, 2)
        engine.backend.link.rpc(vllm_calls.hurt_next_bucket, (0,), 30)
        with pytest.raises(WeightMismatchError):
            engine.update_weights(weights(1), group=group, bucket_bytes=600, verify="full")
        assert holds(engine, 2)
        engine.update_weights(weights(1), group=group)
        assert holds(engine, 1)
    with pytest.raises(InvalidStateError):
        engine.update_weights(weights(1), group=group)
    """)


def test_a_dead_engine_starts_again_with_the_weights(run_vllm):
    run_vllm(
        START
        + textwrap.dedent("""
    from memsaver.integrations.rollout import Restarts
    restarts = Restarts(send=lambda engine: engine.update_weights(weights(2)))
    engine = RolloutEngine.launch(
        kind="vllm", timeout=60, restarts=restarts, model="tiny",
        distributed_executor_backend="uni",
    )
    engine.update_weights(weights(2))
    first = generated(engine)
    [process] = engine.backend.link.engine.engine_core.resources.engine_manager.processes
    process.kill()
    process.join()
    assert generated(engine) == first and holds(engine, 2)
    engine.close()
    """),
        VLLM_FAKE_START="fork",
    )


def test_wrong_arguments_are_refused_before_a_process_starts(run_vllm):
    run_vllm(
        START
        + textwrap.dedent("""
    import multiprocessing
    for wrong in ({"kind": "other"}, {"no_option": 1}, {"tensor_parallel_size": 0, "kind": "x"}):
        with pytest.raises(ConfigError):
            RolloutEngine.launch(**{"kind": "vllm", "timeout": 10, **wrong})
    with pytest.raises(ConfigError):
        RolloutEngine.connect(object(), kind="vllm")
    assert not multiprocessing.active_children()
    """),
    )


RANKS = """
def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    from torch.distributed.device_mesh import init_device_mesh
    RANK = dist.get_rank()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    engine = RolloutEngine.launch(mesh, kind="vllm", timeout=100, model=MODEL)
    def ours(seed, converts=False):
        return engine.backend is None or holds(engine, seed, converts)
LINES
    engine.close()
    dist.barrier()
    dist.destroy_process_group()
    print("fine")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def run_ranks(monkeypatch, tmp_path):
    """Run lines on two trainer ranks that share a two-rank engine."""

    def run(lines, model="tiny"):
        fake = str(TESTS / "fixtures" / "vllm_engine")
        body = textwrap.indent(textwrap.dedent(lines).strip(), "    ")
        code = START + RANKS.replace("MODEL", repr(model)).replace("LINES", body)
        code = f"import sys\nsys.path.insert(0, {fake!r})\n{code}"
        monkeypatch.setenv("PYTHONPATH", fake)
        # The engine core is spawned, because a fork would have the trainer's process group.
        monkeypatch.setenv("VLLM_FAKE_WORKER_START", "fork")
        said = rank_processes.run(code, 2, tmp_path, timeout=150)
        assert all("fine" in text for text in said)

    return run


def test_two_ranks_share_an_engine(run_ranks):
    run_ranks("""
    assert engine.tp_size == 2
    report = engine.update_weights(weights(1), bucket_bytes=600, verify="full")
    assert report.received == report.held == 9 and ours(1)
    mine = engine.generate([[RANK + 1]], {"max_tokens": 3})
    assert mine.lengths.tolist() == [3]
    engine.sleep(wait_idle=True)
    with engine.staged_wake():
        engine.update_weights(weights(2), bucket_bytes=600)
    assert ours(2)
    if engine.backend is not None:  # damaged on the second rank only: loaded on neither
        engine.backend.link.rpc(vllm_calls.hurt_next_bucket, (1,), 30)
    with pytest.raises(WeightMismatchError):
        engine.update_weights(weights(1), verify="full")
    assert ours(2)
    report = engine.update_weights(in_region("trainer", weights(1)), verify="full")
    assert report.mapped == report.held == 9 and ours(1)
    """)


def test_a_session_alternates_between_a_trainer_and_the_engine(run):
    run("""
    import memsaver
    from trainers import Trainer
    from memsaver.integrations.rollout import ColocatedSession
    from memsaver.integrations.trainer import offload

    trainer = Trainer()
    trainer.step()
    trainer.optimizer.zero_grad()
    handles = offload(trainer.model, tag="model"), offload(trainer.optimizer, tag="optimizer")
    seeds = iter((1, 2))
    session = ColocatedSession(
        engine, *handles, state=lambda: weights(next(seeds)), update_options={"verify": "full"}
    )
    outputs = []
    for seed in (1, 2):
        with session.rollout() as one:
            assert memsaver.state("model") == memsaver.state("optimizer") == "paused"
            outputs.append(generated(one))
            assert holds(one, seed)
        assert engine.status is Status.ASLEEP
        with session.training():
            assert memsaver.state("model") == "mapped"
            trainer.step()
            trainer.optimizer.zero_grad()
    assert outputs[0] != outputs[1]
    session.close()
    """)
