"""Tests a sleep controller together with other callers, threads and replicas, in any order of
calls."""

import asyncio
import time

import fake_sglang
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sleep_worlds import ALL

import memsaver
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineError, EngineTimeoutError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.sglang.sleep import SleepController

# --- others, threads and replicas -----------------------------------------------------------------


def test_others_may_release_and_resume_too(make_world, kind):
    world = make_world(kind)
    other = SleepController(world.target)
    other.sleep("weights")
    assert world.controller.refresh() is Status.NO_WEIGHTS
    assert world.controller.sleep().skipped == ("weights",)
    other.wake_up()
    assert world.controller.wake_up().steps == () and world.controller.status is Status.AWAKE


def test_an_engine_that_sleeps_already(make_world):
    world = make_world("local", guarded=False)
    world.controller.sleep(["weights", "kv_cache"])
    controller = SleepController(world.target, released=["weights", "kv_cache"])
    assert controller.status is Status.ASLEEP
    controller.wake_up()
    assert world.released == set()


def test_calls_inside_an_event_loop_are_rejected(make_world):
    world = make_world("local")

    async def main():
        with pytest.raises(InvalidStateError, match="to_thread"):
            world.controller.sleep()
        await asyncio.to_thread(world.controller.sleep)

    asyncio.run(main())
    assert world.released == ALL


def test_an_engine_whose_loop_another_thread_runs(make_world, in_thread, wait_until):
    world = make_world("local")
    loop = world.target.loop
    running = in_thread(loop.run_forever)
    wait_until(loop.is_running)
    world.controller.sleep()
    loop.call_soon_threadsafe(loop.stop)
    running.result()
    world.controller.wake_up()
    assert world.released == set()


def test_differing_replicas_are_reported_and_repaired(make_world, kind):
    # One of two data-parallel schedulers has released its weights, as after a partial failure.
    world = make_world(kind, schedulers=2)
    first, second = world.manager.schedulers
    first.handle(
        "release_memory_occupation", fake_sglang.ReleaseMemoryOccupationReqInput(tags=["weights"])
    )
    assert world.controller.refresh() is Status.NO_WEIGHTS
    world.controller.sleep("weights")
    assert [s.weight_updater.offload_tags for s in (first, second)] == [{"weights"}] * 2
    second.handle("resume_memory_occupation", fake_sglang.ResumeMemoryOccupationReqInput())
    with pytest.raises(InvalidStateError):
        world.controller.generate(prompt="a")
    world.controller.wake_up()
    assert [s.weight_updater.offload_tags for s in (first, second)] == [set()] * 2
    assert world.controller.generate(prompt="a")["text"] == "a!"


@pytest.mark.parametrize("kind", ["server"])  # its loop runs between calls, as in an engine
def test_late_replies_are_not_attributed_to_another_call(make_world, kind):
    world = make_world(kind, schedulers=2)
    manager, first = world.manager, world.scheduler
    # The second scheduler's three replies arrive together, after the first one's were discarded.
    manager.slow = {1: 0.6}
    for _ in range(3):
        with pytest.raises(EngineTimeoutError):
            world.controller._engine.states(0.1)
    first.handle(
        "release_memory_occupation", fake_sglang.ReleaseMemoryOccupationReqInput(tags=["weights"])
    )
    manager.slow = {0: 0.5}
    assert world.controller.refresh() is Status.NO_WEIGHTS
    assert world.controller.released == {"weights"}
    with pytest.raises(InvalidStateError, match="weights"):
        world.controller.generate(prompt="a")
    manager.slow = {}
    world.controller.wake_up()


def test_late_answers_are_not_taken_for_those_to_the_next_call(make_world, kind):
    world = make_world(kind, schedulers=2)
    manager, (first, second) = world.manager, world.manager.schedulers
    everywhere = [s.weight_updater for s in (first, second)]
    manager.slow = {1: 1.5}
    with pytest.raises(EngineTimeoutError):
        world.controller._request("release", ["kv_cache"], time.monotonic() + 0.1)
    # The second scheduler answers this call and the previous one; the first one answers later.
    manager.slow = {0: 2.0}
    world.controller._request("release", ["weights"], time.monotonic() + 20)
    assert [u.offload_tags for u in everywhere] == [{"kv_cache", "weights"}] * 2
    assert world.controller.released == {"kv_cache", "weights"}
    manager.slow = {}
    world.controller.wake_up()
    assert [u.offload_tags for u in everywhere] == [set()] * 2
    assert world.controller.generate(prompt="a")["text"] == "a!"


def test_replies_that_never_fit_leave_the_state_unknown(make_world):
    world = make_world("local", schedulers=2)
    ask = world.controller._engine.states
    world.controller._engine.states = lambda timeout: ask(timeout)[:1] * 2
    with pytest.raises(EngineError, match="each scheduler exactly once"):
        world.controller.sleep()
    with pytest.raises(EngineError, match="each scheduler exactly once"):
        world.controller.refresh()
    assert world.controller.status is Status.UNKNOWN
    del world.controller._engine.states
    world.controller.sleep()
    assert world.controller.status is Status.ASLEEP
    world.controller.wake_up()


# --- any order ------------------------------------------------------------------------------------

_TAGS = st.one_of(
    st.none(),
    st.sampled_from(fake_sglang.TAGS),
    st.lists(st.sampled_from(fake_sglang.TAGS), max_size=3),
)
_CALLS = st.lists(
    st.tuples(st.sampled_from(["sleep", "wake_up", "staged", "generate", "full", "busy"]), _TAGS),
    max_size=12,
)


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "bare"])
def test_no_order_of_calls_ends_the_engine(make_world, kind, guarded):
    world = make_world(kind, guarded)
    engine = world.controller

    def call(name, tags):
        if name == "staged":
            with engine.staged_wake():
                pass
        elif name == "generate":
            engine.generate(prompt="a")
        elif name == "full" and guarded:
            with world.full():
                engine.wake_up(tags)
        elif name == "busy":
            world.scheduler.running.add("somebody's")
            try:
                engine.sleep(tags)
            finally:
                world.scheduler.running.clear()
        elif name != "full":
            getattr(engine, name)(tags)

    @settings(
        max_examples=25,
        deadline=None,
        # The target phase imports a module while other threads parse, which can raise an error in
        # Python 3.11.7 (AST constructor recursion depth mismatch).
        phases=set(Phase) - {Phase.target},
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(_CALLS)
    def run(calls):
        for name, tags in calls:
            before = world.released
            try:
                call(name, tags)
            except ConfigError:
                assert tags == []
            except InvalidStateError:
                assert name == "busy" or (name == "generate" and before)
                assert world.released == before
            except memsaver.OutOfDeviceMemoryError:
                assert name == "full" and world.released == before
            else:
                asked = {tags} if isinstance(tags, str) else set(ALL if tags is None else tags)
                after = {
                    "sleep": before | asked,
                    "busy": before,
                    "wake_up": before - asked,
                    "full": before,
                    "staged": frozenset(),
                    "generate": before,
                }[name]
                assert world.released == after
            assert world.deaths == 0
            assert engine.released == world.released
        engine.wake_up()
        assert engine.generate(prompt="a")["text"] == "a!"

    run()
