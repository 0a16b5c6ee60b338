"""Tests the suspension of NCCL communicators, with a fake NCCL library."""

import threading
import types
from dataclasses import replace

import distributed_ranks
import pytest
from fake_nccl import FakeNccl

import memsaver
from memsaver.integrations.engine import held, nccl
from memsaver.integrations.engine.communicators import Suspender
from memsaver.integrations.engine.ranks import Group, first_failure

MIB = 1 << 20


def suspend(suspender):
    """Suspend communicators; return the rank's report on failure."""
    return first_failure(suspender.suspend(Group(None)))


def resume(suspender):
    """Resume communicators without other work; return the rank's report on failure."""
    return first_failure(suspender.resume(Group(None), lambda: 0, list)[0])


@pytest.fixture
def fake():
    made = FakeNccl()
    yield made
    made.set_version(nccl.SINCE)


@pytest.fixture
def one(fake, tmp_path, sim):
    """Return a one-rank communicator."""
    return fake.communicator(tmp_path, "world", (0,), 0, 512 * MIB)


@pytest.fixture
def suspender(one):
    return Suspender(lambda: [one], 0)


def test_a_communicator_is_suspended_and_resumed_and_a_repeated_call_does_nothing(
    fake, one, suspender
):
    assert not resume(suspender)
    for _ in range(2):
        for _ in range(2):
            assert not suspend(suspender)
            assert not fake.is_usable(one)
            assert fake.nccl.held_bytes(one.handle) == MIB
        for _ in range(2):
            assert not resume(suspender)
            assert fake.is_usable(one)
            assert fake.nccl.held_bytes(one.handle) == 513 * MIB


@pytest.mark.parametrize(("version", "nbytes"), [(22809, MIB), (nccl.SINCE, 0)])
def test_an_old_library_or_a_communicator_without_such_memory_stays(
    fake, tmp_path, sim, version, nbytes
):
    fake.set_version(version)
    one = fake.communicator(tmp_path, "world", (0,), 0, nbytes)
    suspender = Suspender(lambda: [one], 0)
    assert not suspend(suspender)
    assert fake.is_usable(one)


@pytest.mark.parametrize(
    ("keeps", "reported"),
    [([], 0), ([MIB, 2 * MIB], 3 * MIB), ([MIB, 0], None)],
    ids=["no communicators", "all are counted", "one is not counted"],
)
def test_nccl_is_reported_if_it_counts_the_memory_of_all_communicators(
    fake, tmp_path, sim, keeps, reported
):
    ones = [fake.communicator(tmp_path, f"{at}", (0,), 0, 0, n) for at, n in enumerate(keeps)]
    assert held.measure(0, ones).get("nccl") == reported


def test_a_resume_without_memory_leaves_it_suspended(fake, one, suspender, sim):
    suspend(suspender)
    sim.occupy(memsaver.device_memory(0)[0] - 100 * MIB)
    rank = resume(suspender)
    assert rank.failure.kind == "OutOfDeviceMemoryError"
    assert rank.failure.needed > 512 * MIB and rank.failure.free == 100 * MIB
    assert not fake.is_usable(one)
    sim.occupy(0)
    assert not resume(suspender)
    assert fake.is_usable(one)


class Waiting:
    """A fake library whose resume ends only after `go` is set."""

    def __init__(self, library):
        self._library, self.go = library, threading.Event()

    def __getattr__(self, name):
        return getattr(self._library, name)

    def begin_resume(self, handle):
        def resume():
            assert self.go.wait(30)
            self._library.begin_resume(handle).wait(30)
            return 0

        return nccl.Call("resume", resume)


@pytest.mark.parametrize("has_room", [True, False])
def test_other_work_runs_at_the_same_time_if_there_is_memory_for_both(fake, one, sim, has_room):
    library = Waiting(fake.nccl)
    one = replace(one, nccl=library)
    suspender, group = Suspender(lambda: [one], 0), Group(None)
    suspender.suspend(group)
    if not has_room:
        sim.occupy(memsaver.device_memory(0)[0] - 2000 * MIB)
        library.go.set()

    def work():
        assert fake.is_usable(one) != has_room
        library.go.set()
        return group.attempt(lambda: None)

    ranks, worked = suspender.resume(group, lambda: 500 * MIB, work)
    assert not first_failure(ranks) and len(worked) == 1 and fake.is_usable(one)


def test_a_rank_that_stays_away_ends_the_wait(fake, tmp_path):
    one = fake.communicator(tmp_path, "pair", (0, 1), 0, MIB)
    with pytest.raises(nccl.EngineTimeoutError, match="another rank"):
        fake.nccl.begin_suspend(one.handle).wait(0.1)


def test_an_error_of_the_library_is_reported(fake, one, suspender):
    fake.fail(one, 5)
    assert "ncclCommSuspend failed with NCCL's error 5" in suspend(suspender).failure.message
    assert fake.is_usable(one)
    assert not resume(suspender) and fake.is_usable(one)


class TorchOnDevice(threading.local):
    """torch's device functions; the current device of each new thread is 0."""

    def __init__(self):
        self.current = 0
        self.cuda = types.SimpleNamespace(
            current_device=lambda: self.current,
            set_device=lambda device: setattr(self, "current", device),
        )


def test_the_library_is_called_on_the_callers_device(monkeypatch):
    torch, called_on = TorchOnDevice(), []
    monkeypatch.setattr(held, "torch_with_cuda", lambda: torch)
    torch.cuda.set_device(1)
    library = types.SimpleNamespace(
        ncclCommResume=lambda handle: called_on.append(torch.cuda.current_device()) or 0
    )
    nccl.Nccl(library).begin_resume(1).wait(30)
    assert called_on == [1]


def test_an_exception_in_the_call_is_not_a_timeout():
    def fail(handle):
        raise OverflowError("no such handle")

    with pytest.raises(OverflowError, match="no such handle"):
        nccl.Nccl(types.SimpleNamespace(ncclCommResume=fail)).begin_resume(1).wait(30)


def test_a_thread_that_cannot_be_started_fails_the_call(fake, one, suspender, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        rank = suspend(suspender)
    assert "can't start new thread" in rank.failure.message and fake.is_usable(one)
    assert not suspend(suspender) and not fake.is_usable(one)
    assert not resume(suspender) and fake.is_usable(one)


RANKS = """
from pathlib import Path
from fake_nccl import FakeNccl
from memsaver.integrations.engine import nccl
from memsaver.integrations.engine.communicators import Suspender
from memsaver.integrations.engine.ranks import Group, first_failure

begin("gloo")
fake, here = FakeNccl(), Path.cwd()
mine = [fake.communicator(here, f"own {RANK}", (RANK,), 0, MIB)]
both = [fake.communicator(here, name, (0, 1), RANK, 512 * MIB) for name in ("tp", "world")]
outside = fake.communicator(here, "trainer", (0, 1, 2), RANK, MIB)  # a rank is elsewhere
half = [fake.communicator(here, "half", (0, 1), 0, MIB)] if RANK == 0 else []
listed = [outside, *both, *mine, *half]
if RANK:
    listed.reverse()
suspender, group = Suspender(lambda: listed, 0), Group(dist.group.WORLD)

def resume(suspender, group):
    return suspender.resume(group, lambda: 0, list)[0]

def usable():
    return [fake.is_usable(one) for one in both]

for _ in range(3):
    assert not first_failure(suspender.suspend(group))
    assert usable() == [False, False] and not fake.is_usable(mine[0])
    assert all(fake.is_usable(one) for one in (outside, *half))
    assert not first_failure(resume(suspender, group))
    assert usable() == [True, True] and fake.is_usable(mine[0])

# A rank lacks the memory: none resumes.
assert not first_failure(suspender.suspend(group))
with full(1):
    ranks = resume(suspender, group)
    assert ranks[0].failure is None and ranks[1].failure.kind == "OutOfDeviceMemoryError", ranks
    assert usable() == [False, False]
assert not first_failure(resume(suspender, group))
assert usable() == [True, True]

# A rank cannot say which communicators it has: none is suspended.
if RANK:
    listed.append(None)
assert first_failure(suspender.suspend(group)).rank == 1
assert usable() == [True, True]
if RANK:
    listed.pop()

# A rank fails at a communicator of its own: those of both ranks are suspended all the same.
nccl.SECONDS = 2
if RANK:
    fake.fail(mine[0], 1)
ranks = suspender.suspend(group)
assert ranks[0].failure is None and ranks[1].failure.kind == "EngineError", ranks
assert usable() == [False, False]
assert not first_failure(resume(suspender, group)) and fake.is_usable(mine[0])
assert usable() == [True, True]

# A rank fails in the call: the other one does not wait forever, and the next resume says that
# the communicator is lost, and so does the next suspend.
nccl.SECONDS = 0.5
if RANK:
    fake.fail(both[0], 1)
ranks = suspender.suspend(group)
assert [rank.failure.kind for rank in ranks] == ["EngineTimeoutError", "EngineError"], ranks
rank = first_failure(resume(suspender, group))
assert rank.rank == 0 and "restart the engine" in rank.failure.message, rank
rank = first_failure(suspender.suspend(group))
assert rank.rank == 0 and "restart the engine" in rank.failure.message, rank
"""


def test_ranks_suspend_together_what_they_all_have(tmp_path):
    distributed_ranks.run(tmp_path, RANKS, 2)
