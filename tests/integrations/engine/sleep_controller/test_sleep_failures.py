"""Tests a sleep controller with memory shortages, errors, timeouts and invalid engines."""

import contextlib
import gc
import time

import fake_sglang
import pytest
from sleep_worlds import ALL, MIB

import memsaver
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineError, EngineTimeoutError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.engine.tags import RELEASE_ORDER
from memsaver.integrations.sglang.sleep import SleepController


@pytest.mark.parametrize("kind", ["local", "server", "server that hides errors"])
def test_a_wake_without_room_fails_and_the_next_one_works(make_world, kind, caplog):
    world = make_world(kind.partition(" ")[0])
    if "hides" in kind:  # for example, its HTTP workers do not load plugins
        world.server.swallow_errors = True
    world.controller.sleep()
    for tags in (None, "weights", None):
        with world.full(), pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
            world.controller.wake_up(tags)
        assert caught.value.needed > caught.value.free and "rank 0 of 1" in str(caught.value)
        assert world.controller.status is Status.ASLEEP and world.released == ALL
    world.controller.wake_up()
    assert world.released == set() and world.scheduler.model.is_intact()
    assert world.controller.generate(prompt="a")["text"] == "a!"
    del caught
    gc.collect()
    assert "never retrieved" not in caplog.text  # the caller received the error


def test_memory_that_a_failed_wake_left_mapped_is_released_by_the_next_sleep(make_world, kind):
    world = make_world(kind)
    world.controller.sleep()
    updater = world.scheduler.weight_updater
    updater.resume_errors["after kv_cache"] = RuntimeError("no queue")
    unmapping = world.sim.fault("cuMemUnmap", times=0)
    with unmapping, pytest.raises(EngineError, match="could not release it"):
        world.controller.wake_up()
    assert world.controller.status is Status.ASLEEP and world.sim.tag_bytes() == 14 * MIB
    with pytest.raises(InvalidStateError):
        world.controller.generate(prompt="a")
    report = world.controller.sleep()
    assert report.bytes == 14 * MIB and world.sim.tag_bytes() == 0
    assert world.controller.sleep().steps == ()
    updater.resume_errors.clear()
    world.controller.wake_up()
    assert world.released == set() and world.scheduler.model.is_intact()


def test_a_staged_wake_without_room_for_the_rest(make_world, kind):
    world = make_world(kind)
    world.controller.sleep()
    with pytest.raises(memsaver.OutOfDeviceMemoryError), contextlib.ExitStack() as stack:
        stack.enter_context(world.controller.staged_wake())
        world.sim.occupy((80 << 30) - world.sim.physical())
    assert world.controller.status is Status.WEIGHTS_ONLY and world.scheduler.model.is_intact()
    world.sim.occupy(0)
    world.controller.wake_up()


def test_a_server_that_cannot_report_the_effect_of_a_release(make_world):
    world = make_world("server")
    controller = world.controller
    engine_release = controller._engine.release

    def release(tags, timeout):
        answers = engine_release(tags, timeout)
        world.server.failing_infos = 1
        return answers

    controller._engine.release = release
    with pytest.raises(EngineError, match="500"):
        controller.sleep()
    assert world.released == ALL and controller.status is Status.UNKNOWN
    with pytest.raises(InvalidStateError, match="unknown"):
        controller.generate(prompt="a")
    assert controller.sleep().skipped == RELEASE_ORDER  # it queries the engine again
    assert controller.status is Status.ASLEEP
    controller.wake_up()
    assert controller.generate(prompt="a")["text"] == "a!"


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemcpyDtoHAsync"])
def test_a_sleep_that_fails_leaves_the_engine_awake(make_world, kind, call):
    world = make_world(kind)
    with world.sim.fault(call), pytest.raises(memsaver.DriverError):
        world.controller.sleep()
    assert world.controller.status is Status.AWAKE and world.released == set()
    assert world.scheduler.model.is_intact()
    assert world.controller.generate(prompt="a")["text"] == "a!"
    world.controller.sleep()
    assert world.released == ALL


def test_a_dead_engine_is_unknown_and_fails_every_call(make_world, kind):
    world = make_world(kind, guarded=False)
    world.controller.sleep()
    with world.full(), pytest.raises(EngineTimeoutError):
        world.controller.wake_up(timeout=0.3)
    assert world.deaths == 1
    world.expected_deaths = 1
    assert world.controller.status is Status.UNKNOWN
    for call in (world.controller.sleep, world.controller.wake_up):
        with pytest.raises(InvalidStateError, match="unknown"):
            call()
    with pytest.raises(InvalidStateError, match="unknown"):
        world.controller.generate(prompt="a")


def test_an_answer_that_comes_too_late(make_world, kind):
    world = make_world(kind)
    world.manager.answer_seconds = 0.3
    with pytest.raises(EngineTimeoutError):
        world.controller._request("release", ["weights"], time.monotonic() + 0.1)
    assert world.controller.status is Status.UNKNOWN
    world.manager.answer_seconds = 0.0
    end = time.monotonic() + 2
    while not world.scheduler.weight_updater.offload_tags and time.monotonic() < end:
        time.sleep(0.05)  # the engine completes the call after the caller's timeout
    world.controller.refresh()
    assert world.controller.released == world.released
    world.controller.sleep()
    assert world.released == ALL
    world.controller.wake_up()


@pytest.mark.parametrize("operation", ["sleep", "wake_up"])
def test_the_timeout_is_for_all_of_a_call(make_world, kind, operation):
    world = make_world(kind)
    if operation == "wake_up":
        world.controller.sleep()
    before = world.released
    call = getattr(world.controller, operation)
    # An answer may take longer than the call, or so long that there is time for only one query.
    for seconds in (2.0, 0.2):
        world.manager.answer_seconds = seconds
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError):
            call(timeout=0.3)
        assert time.monotonic() - started < 1.0
    world.manager.answer_seconds = 0.0
    time.sleep(0.3)
    world.controller.refresh()
    assert world.controller.released == world.released
    assert world.released in (before, ALL - before)
    call()


def test_a_call_waits_for_another_call_no_longer_than_its_timeout(make_world, in_thread):
    world = make_world("local")
    world.scheduler.running.add("somebody's")
    sleeping = in_thread(world.controller.sleep, wait_idle=True)
    time.sleep(0.1)
    for call in (world.controller.sleep, world.controller.wake_up):
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match="another thread"):
            call(timeout=0.1)
        assert time.monotonic() - started < 1.0
    world.scheduler.running.clear()
    assert sleeping.result().changed == RELEASE_ORDER
    world.controller.wake_up(timeout=5)


def test_a_server_that_cannot_be_reached_is_an_error(make_world):
    with pytest.raises(EngineError, match="cannot be reached"):
        SleepController("http://127.0.0.1:9", timeout=1)
    world = make_world("server")
    server = fake_sglang.Server(world.manager)
    controller = SleepController(server.url, timeout=1)
    controller.sleep()
    server.shutdown()
    with pytest.raises(EngineError):
        controller.wake_up()
    assert world.released == ALL


def test_an_engine_that_was_shut_down(make_world):
    world = make_world("local")
    engine = fake_sglang.Engine(world.manager)
    controller = SleepController(engine)
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        controller.sleep()


def test_an_api_key_is_sent_to_the_server(make_world):
    world = make_world("server")
    world.server.api_key = "secret"
    with pytest.raises(EngineError, match="401") as caught:
        SleepController(world.target)
    assert caught.value.http_status == 401
    SleepController(world.target, api_key="secret").sleep()
    assert world.released == ALL


def test_a_sleep_without_a_memory_saver_raises_and_changes_nothing(make_world, kind):
    world = make_world(kind)
    world.manager.server_args.enable_memory_saver = False
    for _ in range(2):
        with pytest.raises(ConfigError, match="enable_memory_saver=True"):
            world.controller.sleep()
        assert world.released == set() and world.controller.status is Status.AWAKE
    world.manager.server_args.enable_memory_saver = True
    world.controller.sleep()
    assert world.released == ALL
