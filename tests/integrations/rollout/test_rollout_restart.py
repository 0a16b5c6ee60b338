"""Tests restarts of an engine that died: the lost batch, the weights, and the restart limit."""

import threading
import weakref

import pytest
from launchable_engine import launchable

from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineDiedError, EngineError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RestartLimitError, Restarts, RolloutEngine

TWO = {"max_new_tokens": 2}


@pytest.fixture
def sglang(monkeypatch):
    with launchable(monkeypatch) as made:
        yield made


def kill(sglang, number=-1):
    """Kill the first process of an engine and wait until the process has exited."""
    process = sglang.seen[number].processes[0]
    process.kill()
    process.join(10)


def launched(restarts=None, **options):
    return RolloutEngine.launch(model_path="m", timeout=30, restarts=restarts, **options)


def test_the_lost_batch_is_answered_after_a_restart_and_restart_is_for_other_calls(sglang):
    sent = []
    with launched(Restarts(send=lambda engine: sent.append(engine.status))) as engine:
        first = engine.backend
        kill(sglang)
        assert engine.generate(iter([[1], [2]]), TWO).token_ids.tolist() == [[1, 2], [2, 3]]
        assert sent == [Status.AWAKE] and engine.backend is not first
        assert not any(process.is_alive() for process in sglang.seen[0].processes)
        assert all(process.is_alive() for process in sglang.seen[1].processes)
        assert engine.generate([[5]], TWO).token_ids.tolist() == [[5, 6]] and len(sent) == 1
        with engine.asleep():
            assert engine.status is Status.ASLEEP
        kill(sglang)
        with pytest.raises(EngineDiedError):
            engine.sleep()
        engine.restart()
        assert sent == [Status.AWAKE] * 2 and engine.status is Status.AWAKE
        engine.sleep()


def test_an_engine_that_dies_during_a_generation(sglang):
    with launched(Restarts()) as engine:
        manager = engine.backend.link.engine.tokenizer_manager
        manager.generate_seconds = 60
        threading.Timer(0.3, sglang.seen[0].processes[1].kill).start()
        assert engine.generate([[1]], TWO, timeout=30).token_ids.tolist() == [[1, 2]]
        assert len(sglang.seen) == 2


def test_without_the_option_a_death_is_an_error(sglang):
    with launched() as engine:
        kill(sglang)
        with pytest.raises(EngineDiedError, match="status -9"):
            engine.generate([[1]], TWO)
        with pytest.raises(ConfigError, match="restarts"):
            engine.restart()
    assert len(sglang.seen) == 1


def test_the_number_of_restarts_is_limited(sglang):
    with launched(Restarts(most=1, send=lambda _: kill(sglang))) as engine:
        kill(sglang)
        with pytest.raises(RestartLimitError, match=r"1 restarts.*limit: 1\).*status -9"):
            engine.generate([[1]], TWO)
        assert len(sglang.seen) == 2
        with pytest.raises(RestartLimitError):
            engine.restart()
    with launched(Restarts(most=0)) as engine:
        kill(sglang)
        with pytest.raises(RestartLimitError, match="limit: 0"):
            engine.generate([[1]], TWO)
        assert not any(process.is_alive() for process in sglang.seen[-1].processes)
        with pytest.raises(EngineDiedError, match="not started again"):
            engine.sleep()


def test_restarts_that_are_long_ago_do_not_count(sglang):
    with launched(Restarts(most=1, seconds=0.001)) as engine:
        for _ in range(3):
            kill(sglang)
            assert engine.generate([[1]], TWO).token_ids.tolist() == [[1, 2]]
    assert len(sglang.seen) == 4


def test_a_restart_that_fails_is_repeated_within_the_limit(sglang):
    with launched(Restarts(most=4)) as engine:
        kill(sglang)
        sglang.failures = 1
        assert engine.generate([[1]], TWO).token_ids.tolist() == [[1, 2]]
        assert len(sglang.seen) == 3
        kill(sglang)
        sglang.error = RuntimeError("out of memory")
        with pytest.raises(RestartLimitError, match=r"4 restarts.*out of memory"):
            engine.generate([[1]], TWO)
        assert len(sglang.seen) == 5
        with pytest.raises(EngineDiedError):
            engine.sleep()
        with pytest.raises(RestartLimitError):
            engine.generate([[1]], TWO)


@pytest.mark.parametrize("dies", [False, True])
def test_a_new_engine_generates_nothing_before_it_has_weights(sglang, dies):
    tries = []

    def send(engine):
        tries.append(engine)
        if len(tries) == 1:
            raise EngineError("the update failed")
        engine.sleep()  # fails if the engine is dead
        engine.wake_up()

    with launched(Restarts(most=2, send=send)) as engine:
        kill(sglang)
        with pytest.raises(EngineError, match="the update failed"):
            engine.generate([[1]], TWO)
        if dies:
            kill(sglang)
        assert engine.generate([[1]], TWO).token_ids.tolist() == [[1, 2]]
        assert len(tries) == len(sglang.seen) == 2 + dies


def test_a_failed_send_keeps_no_memory_alive_during_the_next_restart(sglang, monkeypatch):
    buckets, start, alive = [], sglang.handle_signals, []

    class Bucket:
        pass

    def send(engine):
        bucket = Bucket()
        buckets.append(weakref.ref(bucket))
        if len(buckets) == 1:
            kill(sglang)
        engine.sleep()
        engine.wake_up()

    def started(manager):
        alive.extend(one() for one in buckets)
        start(manager)

    monkeypatch.setattr(sglang, "handle_signals", started)
    with launched(Restarts(most=2, send=send)) as engine:
        kill(sglang)
        assert engine.generate([[1]], TWO).token_ids.tolist() == [[1, 2]]
    assert len(buckets) == 2 and alive == [None]


@pytest.mark.parametrize(
    "given",
    [{"most": -1}, {"most": 1.5}, {"seconds": 0}, {"seconds": None}, {"send": 5}],
)
def test_invalid_limits_are_rejected_before_the_start(sglang, given):
    with pytest.raises(ConfigError, match="restarts"):
        launched(Restarts(**given))
    with pytest.raises(ConfigError, match="must be a `Restarts` or None, not a int"):
        launched(2)
    assert not sglang.seen


MORTAL = """
from memsaver.integrations.engine.errors import EngineDiedError
from memsaver.integrations.engine.interface import Sample
from memsaver.integrations.rollout import RestartLimitError, Restarts
from memsaver.integrations.sglang import launch as launching, placement

class Mortal(Backend):
    made = []

    def __init__(self, size):
        super().__init__(Manager, size)
        self.why, self.closed, self.answered = "", False, 0
        Mortal.made.append(self)

    def death(self):
        return self.why

    def generate(self, requests, timeout):
        if self.why:
            raise EngineDiedError(f"the engine is dead: {self.why}")
        self.answered += 1
        return [Sample([one.input_ids[0] + 1], None, "stop", None) for one in requests]

    def close(self):
        self.closed = True

def launch(placement, size, arguments, timeout, variables):
    if failures:
        failures.pop()
        raise EngineError("no memory")
    return Mortal(size)

failures = []
launching.launch, placement.gpu_of_this_process = launch, lambda: None
"""


def test_all_ranks_of_a_mesh_restart_together(run_ranks):
    run_ranks(4, MORTAL)("""
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
sent = []

def send(engine):
    sent.append(update(engine, checkpoint(3), verify="full").held)

engine = RolloutEngine.launch(mesh, timeout=20, restarts=Restarts(most=2, send=send))
leader = engine.layout.is_leader

def answers(number):
    output = engine.generate([[10 * RANK + number]])
    return output.token_ids.tolist() == [[10 * RANK + number + 1]]

assert answers(1) and not sent
if RANK == 2:  # the leader of the second engine
    engine.backend.why = "killed"
assert answers(2) and sent == [13]
assert len(Mortal.made) == {0: 1, 2: 2}.get(RANK, 0)
if leader:
    assert engine.backend is Mortal.made[-1] and holds(engine.backend, checkpoint(3))
    assert not engine.backend.closed and all(one.closed for one in Mortal.made[:-1])
    assert [one.answered for one in Mortal.made] == ([2] if RANK == 0 else [1, 1])
# Both engines die, and the restart of one fails once.
if leader:
    engine.backend.why = "killed"
if RANK == 0:
    failures.append(1)
error = refused(RestartLimitError, lambda e: e.generate([[1]]), engine)
assert "2 restarts" in str(error) and "no memory" in str(error), error
refused(RestartLimitError, lambda e: e.restart(), engine)
refused(EngineDiedError, lambda e: update(e, checkpoint(3)), engine)
engine.close()
# Limits that differ are an error on all ranks.
def rejected(kind, restarts):
    return refusals.raises(kind, RolloutEngine.launch, mesh, timeout=20, restarts=restarts)

assert "restarts" in rejected(ConfigError, Restarts(most=RANK))
# An engine that does not start, or whose limits differ, is an error for the ranks of all engines.
if RANK == 2:
    failures.append(1)
text = rejected(EngineError, Restarts())
assert "no memory" in text and "rank 2" in text, text
for given in (None, Restarts(most=3)):
    assert "restarts: most=2" in rejected(RankError, Restarts() if RANK < 2 else given)
""")


def test_weights_that_one_rank_could_not_send_are_sent_again_by_all(run_ranks):
    run_ranks(2, MORTAL)("""
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
sent = []

def send(engine):
    sent.append(update(engine, checkpoint(3), verify="full").held)
    if RANK == 1 and len(sent) == 1:
        raise EngineError("the update's log was not written")

engine = RolloutEngine.launch(mesh, timeout=20, restarts=Restarts(send=send))
if RANK == 0:
    engine.backend.why = "killed"
error = refused(EngineError, lambda e: e.generate([[RANK]]), engine)
assert "log was not written" in str(error) and "rank 1" in str(error), error
assert engine.generate([[RANK]]).token_ids.tolist() == [[RANK + 1]]
assert sent == [13, 13]
engine.close()
""")
