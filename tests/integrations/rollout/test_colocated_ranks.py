"""Test a colocated session on several ranks: FSDP2 trainers, and faults on some of the ranks."""

import textwrap

import pytest
import rank_processes

pytest.importorskip("torch")

PRELUDE = """
import os, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import memsaver
from memsaver.distributed import GroupError, RankError
from memsaver.integrations.rollout import ColocatedSession, Phase, Stage
from memsaver.integrations.engine.errors import EngineTimeoutError
from colocated_engine import TagEngine, stages_of
from simulated_driver import Simulator
from trainers import Trainer, plain_model

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo",
    store=dist.FileStore("store", SIZE),
    rank=RANK,
    world_size=SIZE,
    timeout=timedelta(seconds=30),
)
sim = Simulator()
sim.start()
X = torch.ones(4)
CALLS = ["wake_up weights", "update_weights", "wake_up all", "sleep"]


def sharded():
    model = plain_model()
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(trainer):
    trainer.step()
    trainer.optimizer.zero_grad()


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def gathered(value):
    everyones = [None] * SIZE
    dist.all_gather_object(everyones, value)
    return everyones


def rollout(inside=lambda engine: None):
    with session.rollout() as engine:
        inside(engine)


def training(inside=lambda: None):
    with session.training():
        inside()


trainer = Trainer(model=sharded)
step(trainer)
engine = TagEngine(trainer.model, "weights", "kv_cache")
session = ColocatedSession(engine, trainer.model, trainer.optimizer, timeout=20)
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Run code on all ranks of a group; each rank must end with the status given for it."""

    def run(code, size, statuses=None):
        text = PRELUDE + textwrap.dedent(code) + "\ndist.destroy_process_group()\n"
        rank_processes.run(text, size, tmp_path, statuses=statuses, timeout=100)

    return run


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_steps_of_ranks_are_bit_equal_to_those_without_sleep(run_ranks, size):
    run_ranks(
        """
        expected = Trainer(model=sharded)
        step(expected)
        plain_engine = TagEngine(expected.model, "plain weights", "plain kv")
        plain = ColocatedSession(plain_engine, expected.model, expected.optimizer, sleep=False)
        for number in range(4):
            with session.rollout() as given:
                held = [row.tag for row in memsaver.stats().tags if row.resident_bytes]
                assert not {"model", "optimizer"} & set(held), held
                mine = given.generate(X)
            assert all(
                row.resident_bytes == 0
                for row in memsaver.stats().tags
                if row.tag in ("model", "optimizer", "weights", "kv_cache")
            )
            with plain.rollout() as given:
                assert torch.equal(given.generate(X), mine)
            with session.training(), plain.training():
                step(trainer)
                step(expected)
                assert trainer.contents() == expected.contents(), number
        for report in session.stages:
            assert [rank.rank for rank in report.ranks] == list(range(SIZE))
            assert all(0 < rank.peak_bytes <= rank.total_bytes for rank in report.ranks)
            assert gathered(report.ranks) == [report.ranks] * SIZE
        assert len(session.stages) > 8
        """,
        size,
    )


def test_ranks_overlap_alike_and_share_failures_of_the_background(run_ranks):
    run_ranks(
        """
        expected = Trainer(model=sharded)
        step(expected)
        session.close()
        session = ColocatedSession(
            engine, trainer.model, trainer.optimizer, overlap=True, timeout=20
        )
        optimizer = lambda: str(memsaver.state("optimizer"))

        def cycle(overlaps):
            rollout()
            stages = stages_of(session)
            assert (stages[1] is Stage.RESUME_MODEL) == overlaps, stages
            training(lambda: step(trainer))
            step(expected)
            assert trainer.contents() == expected.contents()

        cycle(False), cycle(False), cycle(True)
        # No room on one rank: no rank overlaps.
        if RANK == 0:
            sim.occupy(memsaver.device_memory(0)[0] - (1 << 29))
        cycle(False)
        sim.occupy(0)
        cycle(True)

        # A pause that fails on one rank: the states are mapped on all ranks.
        with sim.fault("cuMemUnmap" if RANK == 0 else "cuInit", 1, times=0):
            error = raised(memsaver.DriverError, rollout)
        assert list(error.failures) == [0] and "pause_optimizer" in str(error)
        assert optimizer() == "mapped"
        # A resume that fails on one rank: the step raises there, the end of the block elsewhere.
        rollout()
        begin = session._trainer.begin_resume
        def failing():
            if RANK == 1:
                sim.fail("cuMemCreate", sim.OUT_OF_MEMORY)
            return begin()
        session._trainer.begin_resume = failing
        kind = memsaver.OutOfDeviceMemoryError
        error = raised(kind, lambda: training(trainer.optimizer.step))
        assert optimizer() == ["mapped", "paused"][RANK]
        del session._trainer.begin_resume
        assert session.stages[-1].stage is Stage.TRAIN and session.stages[-1].error
        training()
        assert optimizer() == "mapped"
        rollout(lambda engine: engine.generate(X))
        """,
        2,
    )


def test_an_interrupt_of_a_rank_is_an_error_on_the_others_and_never_dropped(run_ranks):
    run_ranks(
        """
        import signal
        training()
        before = trainer.contents()
        at = None

        def interrupt(report):
            if RANK == 1 and report.stage is at:
                signal.raise_signal(signal.SIGINT)

        session._on_stage = interrupt

        def ends(call):
            return type(raised(BaseException, call)).__name__

        # At the end of each stage: between it and the next one, or the block.
        stages = {stage: rollout for stage in Stage}
        stages |= {Stage.SLEEP: training, Stage.RESUME_TRAINER: training}
        for at, call in stages.items():
            if at in (Stage.TRAIN, Stage.GENERATE):
                continue  # the last of a call, or followed by one of the same call: below
            session._is_current = False
            expected = ["RankError", "KeyboardInterrupt"]
            assert gathered(ends(call)) == expected, (at, expected)
            assert session.phase is Phase.IDLE
            at = None
            training()
            assert trainer.contents() == before
        # In the block, in its words and out of them.
        def inside(engine):
            if RANK == 1:
                signal.raise_signal(signal.SIGINT)
        assert gathered(ends(lambda: rollout(inside))) == ["RankError", "KeyboardInterrupt"]
        # After an error of the block: both ranks know of the error, and the interrupt is raised.
        at = Stage.TRAIN
        def fail():
            if RANK == 1:
                raise ValueError()
        assert gathered(ends(lambda: training(fail))) == ["RankError", "KeyboardInterrupt"]
        at = None
        rollout()
        training()
        assert trainer.contents() == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        """,
        2,
    )


def test_arguments_of_a_session_that_differ_between_ranks_are_an_error_on_all(run_ranks):
    run_ranks(
        """
        class Collective(TagEngine):
            def update_weights(self, state, scale=1.0):
                dist.barrier()  # as a RolloutEngine, whose ranks wait for each other
                return super().update_weights(state, scale)

        session.close()
        for tag in ("first", "second"):
            with memsaver.region(tag, backup="host"):
                pass
        engine = Collective(trainer.model, "other weights", "other kv_cache")
        for name, *values in (
            ("sleep", True, False),
            ("overlap", True, False),
            ("whole_updates", False, True),
            ("engine_keeps_weights", False, True),
            ("tags", ("first",), ("first", "second")),
        ):
            options = {name: values[RANK]}
            error = raised(
                memsaver.ConfigError,
                lambda: ColocatedSession(engine, plain_model(), timeout=20, **options),
            )
            assert f"{name} must be equal on all ranks" in str(error), error
            assert "on rank 0" in str(error) and "on rank 1" in str(error), error

        # The functions that return the weights and the options, before a rank waits in the engine.
        class Broken(Exception):
            pass

        def state():
            if broken == "state" and RANK == 1:
                raise Broken("no weights")
            return trainer.model.state_dict()

        def options():
            if broken == "options" and RANK == 0:
                raise Broken("no options")
            return [("scale", 1.0)] if broken == "pairs" and RANK == 1 else {"scale": 1.0}

        session = ColocatedSession(
            engine, trainer.model, state=state, update_options=options, sleep=False, timeout=20
        )
        for broken, kind, text in (
            ("state", RankError, "Broken: no weights"),
            ("options", RankError, "Broken: no options"),
            ("pairs", memsaver.ConfigError, "update_options must be a mapping"),
        ):
            started = time.monotonic()
            error = raised(kind, rollout)
            assert text in str(error) and time.monotonic() - started < 10, error
        broken = ""
        rollout()
        """,
        2,
    )


def test_a_failure_on_one_rank_is_raised_on_all_ranks(run_ranks):
    run_ranks(
        """
        training()
        before = trainer.contents()
        # Each stage of the engine, on one rank; the kinds are different ones.
        for number, call in enumerate(CALLS):
            guilty = number % SIZE
            if RANK == guilty:
                engine.fail[call] = memsaver.OutOfDeviceMemoryError(f"{call} broke")
            error = raised(memsaver.OutOfDeviceMemoryError, rollout)
            assert list(error.failures) == [guilty] and f"{call} broke" in str(error)
            assert f"rank {guilty} of 2" in str(error)
            assert gathered(str(error)) == [str(error)] * SIZE
            assert (RANK == guilty) == isinstance(
                error.__cause__, memsaver.OutOfDeviceMemoryError
            )
            assert session.phase is Phase.IDLE
            rollout(lambda engine: engine.generate(X))
            training()
            assert trainer.contents() == before, call

        # All alike: what it is, not that it is all of them.
        engine.fail["wake_up all"] = memsaver.OutOfDeviceMemoryError("no room anywhere")
        error = raised(memsaver.OutOfDeviceMemoryError, rollout)
        assert list(error.failures) == [0, 1] and "ranks 0-1 of 2" in str(error)
        # Differently.
        engine.fail["wake_up all"] = [memsaver.DriverError, memsaver.ConfigError][RANK]("of it own")
        error = raised(RankError, rollout)
        assert [error.failures[r].kind for r in (0, 1)] == ["DriverError", "ConfigError"]
        rollout()

        # No memory for the trainer on one rank: none has it resumed.
        if RANK == 1:
            sim.occupy(memsaver.device_memory(0)[0])
        error = raised(RankError, training)
        assert list(error.failures) == [1]
        assert [str(memsaver.state(t)) for t in ("model", "optimizer")] == ["paused"] * 2
        sim.occupy(0)
        training()
        assert trainer.contents() == before

        # No memory for a pause's backup on one rank: all have it mapped.
        if RANK == 0:
            memsaver.trim(wait=True)
            memsaver.configure(fingerprints=False)
            sim.host_limit(0)
        error = raised(RankError, rollout)
        assert list(error.failures) == [0]
        assert error.failures[0].kind == "OutOfHostMemoryError", error
        assert str(memsaver.state("model")) == "mapped"
        sim.host_limit()
        training()
        assert trainer.contents() == before

        # A pause that the driver refuses on one rank: the same.
        with sim.fault("cuMemUnmap" if RANK == 0 else "cuInit", 1, times=0):
            error = raised(RankError, rollout)
        assert list(error.failures) == [0]
        assert str(memsaver.state("model")) == "mapped"
        rollout(lambda engine: engine.generate(X))
        training()
        assert trainer.contents() == before

        # An engine that takes all of its time, and fails then.
        def hangs(*_, **named):
            time.sleep(named["timeout"] + 1)
            raise EngineTimeoutError("no answer")

        session._timeout = 2
        works = engine.sleep
        if RANK == 1:
            engine.sleep = hangs
        error = raised(EngineTimeoutError, rollout)
        assert list(error.failures) == [1] and "no answer" in str(error)
        session._timeout, engine.sleep = 20, works
        training()

        # A session that cannot begin on one rank: on none, and no hooks are left.
        hooks = len(trainer.model._forward_pre_hooks)
        optimizer = None if RANK == 0 else object()
        error = raised(
            memsaver.ConfigError, lambda: ColocatedSession(engine, trainer.model, optimizer)
        )
        assert list(error.failures) == [1] and "not object" in str(error)
        assert len(trainer.model._forward_pre_hooks) == hooks
        """,
        2,
    )


def test_a_bad_argument_of_a_rank_is_an_error_on_all_ranks_at_once(run_ranks):
    run_ranks(
        """
        class Odd:
            __repr__ = __eq__ = __hash__ = __lt__ = __bool__ = lambda self, *_: 1 / 0

        everyone = dist.new_group()
        closed = dist.new_group()
        dist.destroy_process_group(closed)
        hooks = len(trainer.model._forward_pre_hooks)
        config, state, key = "ConfigError", "InvalidStateError", "UnknownTagError"
        start = time.monotonic()
        for bad, kind in (
            ({"backup": "none"}, config),
            ({"backup": "tape"}, config),
            ({"backup": Odd()}, None),
            ({"state": 5}, config),
            ({"engine": object()}, config),
            ({"model": object()}, config),
            ({"optimizer": object()}, config),
            ({"on_stage": 5}, config),
            ({"timeout": -1}, config),
            ({"timeout": 10**400}, config),
            ({"timeout": Odd()}, config),
            ({"block_timeout": "soon"}, config),
            ({"block_timeout": Odd()}, config),
            ({"sleep": Odd()}, "ZeroDivisionError"),
            ({"engine_keeps_weights": Odd()}, "ZeroDivisionError"),
            ({"tags": "reference"}, config),
            ({"tags": 5}, config),
            ({"update_options": 5}, config),
            ({"tags": ["never seen"]}, key),
            ({"group": "everyone"}, config),
            ({"group": Odd()}, config),
            ({"group": closed}, state),
        ):
            for group in (None, everyone):
                given = {
                    "engine": engine,
                    "model": trainer.model,
                    "optimizer": trainer.optimizer,
                    "group": group,
                    "timeout": 40,
                    **(bad if RANK == 1 else {}),
                }
                error = raised(memsaver.MemsaverError, lambda: ColocatedSession(**given))
                assert list(error.failures) == [1], (bad.keys(), error)
                assert kind in (None, error.failures[1].kind), error
                assert gathered(str(error)) == [str(error)] * SIZE
                assert len(trainer.model._forward_pre_hooks) == hooks, bad.keys()
        assert time.monotonic() - start < 35, "no wait lasted until a timeout"
        rollout(lambda engine: engine.generate(X))
        training()
        """,
        2,
    )


def test_an_exception_in_a_block_of_a_rank_is_raised_on_the_others(run_ranks):
    run_ranks(
        """
        def fails(*_):
            if RANK == 1:
                raise ZeroDivisionError("of rank 1")

        for call, name in ((rollout, "generate"), (training, "train")):
            if RANK == 1:
                assert "of rank 1" in str(raised(ZeroDivisionError, lambda: call(fails)))
            else:
                error = raised(RankError, lambda: call(fails))
                assert list(error.failures) == [1]
                assert "ZeroDivisionError: of rank 1" in str(error) and name in str(error)
            assert session.phase is Phase.IDLE
            rollout(lambda engine: engine.generate(X))
            training()
        """,
        2,
    )


def test_ranks_that_call_different_things_are_refused_before_anything_is_done(run_ranks):
    run_ranks(
        """
        training()
        before, heard = trainer.contents(), list(engine.heard)
        error = raised(RankError, rollout if RANK == 0 else training)
        assert "same call" in str(error)
        assert gathered(str(error)) == [str(error)] * SIZE
        assert engine.heard == heard and session.phase is Phase.IDLE

        # So are ranks that know other things of the engine's weights.
        session._keeps = True
        rollout()
        training()
        rollout()
        if RANK == 1:
            session.weights_changed()
        assert "same call" in str(raised(RankError, rollout))
        session.weights_changed()
        rollout()

        # And all ranks that nest blocks.
        def nested():
            with session.training():
                rollout()

        assert "inside a training" in str(raised(memsaver.InvalidStateError, nested))
        rollout()
        training()
        assert trainer.contents() == before
        """,
        2,
    )


def test_a_rank_that_dies_or_stays_away_ends_the_wait(run_ranks):
    run_ranks(
        """
        training()
        before = trainer.contents()
        session._timeout = session._block_timeout = session._trainer._timeout = 10
        if RANK == 1:
            def fall(*_):
                os._exit(7)

            session.engine.update_weights = fall
        began = time.monotonic()
        error = raised(GroupError, rollout)
        assert time.monotonic() - began < 25
        assert "update" in str(error) and error.missing in ((1,), ())
        assert session.phase is Phase.IDLE
        assert str(memsaver.state("model")) == "mapped"
        memsaver.resume()
        assert trainer.contents() == before
        os._exit(0)
        """,
        2,
        statuses={1: 7},
    )
