"""Test schedulers of SGLang 0.5.12, which implement the handlers of release and resume themselves.

The hooks wrap a fake's handlers, on the simulated driver. The behaviour is that of later versions;
see test_sglang_scheduler.py.
"""

from __future__ import annotations

import pytest
import scheduler_calls
import sglang_stand_in as stand_in
from scheduler_calls import ask, states

import memsaver
from memsaver.integrations.engine.messages import error_of
from memsaver.integrations.sglang import EngineBusyError, SleepController, Status, hooks

MIB = 1 << 20


@pytest.fixture
def sglang(monkeypatch):
    with stand_in.modules(monkeypatch, older=True) as classes:
        hooks.install()
        yield classes


@pytest.fixture
def scheduler(sglang, sim, tag, make_blocks):
    tag.names.extend(stand_in.TAGS)
    scheduler = sglang.Scheduler()
    assert not hasattr(scheduler, "weight_updater")
    scheduler_calls.hold(scheduler, make_blocks)
    yield scheduler
    scheduler_calls.let_go(scheduler)


def test_release_and_resume_move_the_memory_of_older_schedulers(scheduler, sim):
    before = sim.tag_bytes()
    answer = ask(scheduler, "release")
    assert answer.failure is None and answer.ranks[0].bytes == before and sim.tag_bytes() == 0
    assert scheduler.offload_tags == set(stand_in.TAGS) and scheduler.flushed == 1
    assert scheduler.stashed_model_static_state["buffers"]  # the model's buffers, until the resume
    answer = ask(scheduler, "resume", ["weights"])
    assert set(answer.released) == {"kv_cache", "cuda_graph"} and scheduler.model.is_intact()
    assert not hasattr(scheduler, "stashed_model_static_state")
    answer = ask(scheduler, "resume")
    assert answer.released == () and scheduler.offload_tags == set()
    assert scheduler.kv.is_zero() and scheduler.graph.is_intact()


@pytest.mark.parametrize("tags", [None, ["weights"], ["weights", "kv_cache"]])
def test_doing_it_twice_changes_nothing(scheduler, tags):
    for operation, times in (("resume", 1), ("release", 2), ("resume", 2)):
        for _ in range(times):
            assert ask(scheduler, operation, tags).failure is None
    assert set(states().values()) == {"mapped"} and scheduler.model.is_intact()


def test_unknown_tags_and_a_busy_engine_change_nothing(scheduler):
    answer = ask(scheduler, "release", ["optimizer"])
    assert isinstance(error_of([answer]), memsaver.ConfigError)
    scheduler.begin("a")
    assert isinstance(error_of([ask(scheduler, "release")]), EngineBusyError)
    assert set(states().values()) == {"mapped"} and scheduler.offload_tags == set()
    scheduler.end("a")
    assert ask(scheduler, "release").failure is None
    ask(scheduler, "resume")


def test_a_resume_without_room_can_be_repeated(scheduler, sim):
    ask(scheduler, "release")
    sim.occupy(memsaver.device_memory(0)[0] - 6 * MIB)
    error = error_of([ask(scheduler, "resume")])
    assert isinstance(error, memsaver.OutOfDeviceMemoryError) and error.free == 6 * MIB
    assert set(states().values()) == {"paused"}
    assert scheduler.offload_tags == set(stand_in.TAGS)
    sim.occupy(0)
    assert ask(scheduler, "resume").released == ()
    assert scheduler.model.is_intact() and scheduler.graph.is_intact()


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemcpyDtoHAsync"])
def test_a_release_that_fails_leaves_everything_mapped(scheduler, sim, call):
    with sim.fault(call):
        answer = ask(scheduler, "release")
    assert isinstance(error_of([answer]), memsaver.MemsaverError)
    assert set(states().values()) == {"mapped"} and scheduler.offload_tags == set()
    assert scheduler.model.is_intact()
    assert ask(scheduler, "release").failure is None
    ask(scheduler, "resume")
    assert scheduler.model.is_intact()


def test_a_failure_of_sglangs_own_part_is_undone(scheduler):
    scheduler.prepare_error = RuntimeError("a weight cache is active")
    assert "a weight cache is active" in str(error_of([ask(scheduler, "release")]))
    assert set(states().values()) == {"mapped"} and scheduler.offload_tags == set()
    scheduler.prepare_error = None
    assert ask(scheduler, "release").failure is None
    ask(scheduler, "resume")


def test_a_controller_reads_the_state(scheduler, sglang):
    engine = stand_in.Engine(sglang.Tokenizer([scheduler]))
    try:
        controller = SleepController(engine, timeout=30)
        assert controller.guarded and controller.status is Status.AWAKE
        ask(scheduler, "release", ["kv_cache"])
        assert controller.refresh() is Status.WEIGHTS_ONLY
        controller.sleep()
        controller.wake_up()
        assert controller.status is Status.AWAKE and scheduler.model.is_intact()
    finally:
        engine.shutdown()
