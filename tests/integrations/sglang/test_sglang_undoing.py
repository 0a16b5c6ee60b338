"""Tests releases and resumes that fail on one of two data-parallel replicas.

The fake replicas share a process and therefore memsaver's tags, so a fake replaces the calls to
memsaver: it records each replica's memory and fails on request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools

import pytest
from sleep_worlds import started

from memsaver import OutOfDeviceMemoryError
from memsaver.integrations.engine import moves
from memsaver.integrations.engine.errors import EngineAsleepError, EngineBusyError
from memsaver.integrations.engine.messages import Failure, RankReport
from memsaver.integrations.sglang import admissions, tokenizer
from memsaver.integrations.sglang.sleep import SleepController

ALL = {"kv_cache", "weights", "cuda_graph"}
FAILURE = Failure("OutOfDeviceMemoryError", "no room")


class Replicas:
    """A fake engine with two replicas, whose releases and resumes can fail.

    Attributes:
        failing: pairs of an operation and the number of the call that fails, counted from now.
    """

    def __init__(self, cleanup, monkeypatch, kind, when, backup):
        monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP", when)
        monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_WAIT", "0.2")
        self.manager, target = started(cleanup, monkeypatch, kind, 2, hooked=True)
        for name, value in {
            "dp_size": 2,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": backup,
        }.items():
            setattr(self.manager.server_args, name, value)
        self.backup = backup
        self.controller = SleepController(target, timeout=10)
        self.failing = set()
        self.paused = {}  # the tags without memory, by scheduler
        for scheduler in self.manager.schedulers:
            self.paused[scheduler] = set()
            scheduler.server_args.enable_weights_cpu_backup = backup
            scheduler.handle = functools.partial(self.handle, scheduler, scheduler.handle)
        monkeypatch.setattr(moves, "are_memsavers", lambda tags: True)
        monkeypatch.setattr(moves, "is_mapped", lambda tags: False)
        monkeypatch.setattr(moves, "paused_bytes", lambda tags: 0)
        self.policies = []  # of the releases
        monkeypatch.setattr(moves, "pause", self.pause)
        monkeypatch.setattr(moves, "resume", lambda group, tags, *_: self.moved("resume", tags))

    def handle(self, scheduler, original, *message):
        self.handling = scheduler
        return original(*message)

    def pause(self, group, tags, policies=None):
        self.policies.append(policies)
        return self.moved("release", tags)

    def moved(self, operation, tags):
        fails = (operation, 0) in self.failing
        self.failing = {(name, left - (name == operation)) for name, left in self.failing}
        if fails:
            return [RankReport(0, "host", 1, failure=FAILURE)]
        paused = self.paused[self.handling]
        moved = set(tags) - paused if operation == "release" else paused.intersection(tags)
        paused ^= moved
        copied = dict.fromkeys(moved & {"weights"} if self.backup else (), 1)
        return [RankReport(0, "host", 1, 0.0, dict.fromkeys(moved, 1), copied)]

    @property
    def released(self):
        return [set(one.weight_updater.offload_tags) for one in self.manager.schedulers]


@pytest.fixture
def replicas(monkeypatch):
    with contextlib.ExitStack() as cleanup:
        yield lambda kind="local", when="refuse", backup=True: Replicas(
            cleanup, monkeypatch, kind, when, backup
        )


@pytest.mark.parametrize("kind", ["local", "server"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_failed_release_is_undone_on_the_other_replica(replicas, kind, guilty):
    world = replicas(kind)
    world.failing = {("release", guilty)}
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        world.controller.sleep()
    assert world.released == [set(), set()]
    if kind == "local":
        assert str(caught.value).endswith("; other replicas have undone their release")
    assert world.controller.released == set()
    world.controller.sleep()
    assert world.released == [ALL, ALL]


@pytest.mark.parametrize("kind", ["local", "server"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_failed_resume_is_undone_on_the_other_replica(replicas, kind, guilty):
    world = replicas(kind)
    world.controller.sleep()
    world.failing = {("resume", guilty)}
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        world.controller.wake_up()
    assert world.released == [ALL, ALL]
    if kind == "local":
        assert str(caught.value).endswith("; other replicas have undone their resume")
    assert world.controller.released == ALL
    world.controller.wake_up()
    assert world.released == [set(), set()]


def test_a_replica_undoes_only_what_it_has_just_done(replicas):
    world = replicas()
    world.controller.sleep("weights")
    first = world.manager.schedulers[0]  # as after a resume that reached only this replica
    first.weight_updater.offload_tags.clear()
    world.paused[first].clear()
    world.failing = {("release", 0)}
    with pytest.raises(OutOfDeviceMemoryError):
        world.controller.sleep()
    assert world.released == [set(), {"weights"}]


@pytest.mark.parametrize("kind", ["local", "server"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_weights_that_the_undo_could_not_restore_are_lost(replicas, kind, guilty):
    world = replicas(kind, backup=False)
    world.failing = {("release", guilty)}
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        world.controller.sleep()
    if kind == "local":
        assert str(caught.value).endswith("but the contents of their weights are lost")
    assert world.released == [set(), set()] and "weights" in world.controller.lost


@pytest.mark.parametrize("kind", ["local", "server"])
def test_a_failed_undo_does_not_hide_the_cause(replicas, kind):
    world = replicas(kind)
    world.controller.sleep()
    world.failing = {("resume", 1), ("release", 1)}  # the first release is the rollback
    with pytest.raises(OutOfDeviceMemoryError, match="resume of") as caught:
        world.controller.wake_up()
    if kind == "local":
        assert "could not undo their resume: release of" in str(caught.value)
    assert world.released == [set(), ALL]
    world.controller.wake_up()
    assert world.released == [set(), set()]


def test_an_exception_in_the_undo_does_not_hide_the_cause(replicas, monkeypatch):
    world = replicas()
    world.failing = {("release", 1)}

    def broken(manager):
        raise ZeroDivisionError("a broken connection")

    monkeypatch.setattr(
        type(world.manager), "resume_memory_occupation_communicator", property(broken)
    )
    with pytest.raises(OutOfDeviceMemoryError, match=r"could not undo .*: a broken connection"):
        world.controller.sleep()


def test_memory_that_was_resumed_without_contents_is_not_saved_by_the_undo(replicas):
    world = replicas()
    world.controller.sleep()
    world.failing = {("resume", 1)}
    with pytest.raises(OutOfDeviceMemoryError):
        world.controller.wake_up(keep_weights=False)
    assert world.released == [ALL, ALL]
    assert world.policies[-2:] == [{"weights": "none"}] * 2  # the rollback's and the undo's
    assert "weights" in world.controller.lost


@pytest.mark.parametrize("operation", ["release", "resume"])
def test_a_cancelled_call_is_undone_too(replicas, operation):
    world = replicas()
    if operation == "resume":
        world.controller.sleep()
    before = world.released
    world.failing = {(operation, 1)}
    world.manager.slow = {1: 0.3}

    async def cancelled():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(requested(world, operation), 0.15)
        await asyncio.sleep(1.5)

    world.manager.engine.loop.run_until_complete(cancelled())
    assert world.released == before


def test_a_busy_replica_keeps_all_replicas_mapped(replicas):
    world = replicas()
    world.manager.schedulers[1].running.add("a request")
    first = world.manager.schedulers[0].handlers
    with pytest.raises(EngineBusyError, match="no replica has changed"):
        world.manager.engine.loop.run_until_complete(requested(world, "release"))
    assert world.released == [set(), set()] and first.queue_open


def test_a_request_that_cannot_wake_all_replicas_wakes_none(replicas):
    world = replicas(when="wake")
    world.controller.sleep()
    run = world.manager.engine.loop.run_until_complete
    admission = admissions.admission_of(world.manager)

    async def ask():
        await admission.refresh()
        await admission.admit(frozenset(ALL), "generate")

    world.failing = {("resume", number) for number in range(1, 99, 2)}
    with pytest.raises(EngineAsleepError):
        run(ask())
    assert world.released == [ALL, ALL]
    world.failing = set()
    run(ask())
    assert world.released == [{"cuda_graph"}] * 2  # the graphs' memory is not pausable here


def requested(world, operation):
    """Return a call that releases or resumes all memory, as a coroutine."""
    from sglang.srt.managers import io_struct

    kind = {"release": "Release", "resume": "Resume"}[operation]
    request = getattr(io_struct, f"{kind}MemoryOccupationReqInput")()
    return getattr(world.manager, f"{operation}_memory_occupation")(request)


def test_a_call_that_was_cancelled_before_it_was_sent_does_nothing(replicas):
    world = replicas()
    changing = admissions.admission_of(world.manager).changing

    async def cancelled():
        async with changing:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(requested(world, "release"), 0.1)
        await asyncio.sleep(0.3)
        assert not changing.locked()

    world.manager.engine.loop.run_until_complete(cancelled())
    assert world.released == [set(), set()]


def test_a_replica_that_does_not_answer_delays_later_calls_for_a_limited_time(
    replicas, monkeypatch
):
    world = replicas()
    monkeypatch.setattr(tokenizer, "_GRACE_SECONDS", 0.2)
    never = asyncio.Event()

    async def unanswered(manager, obj):
        await never.wait()

    kind = type(world.manager)
    monkeypatch.setattr(kind, "release_memory_occupation_communicator", unanswered)

    async def calls():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(requested(world, "release"), 0.1)
        await asyncio.wait_for(requested(world, "resume"), 5)
        assert admissions.admission_of(world.manager).released == frozenset()

    world.manager.engine.loop.run_until_complete(calls())
