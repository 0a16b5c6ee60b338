"""Tests a sleep controller's contract: states, requests in progress, and context managers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sleep_worlds import ALL, MIB

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineBusyError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.engine.tags import RELEASE_ORDER

# --- states ---------------------------------------------------------------------------------------


def test_a_whole_cycle_of_sleep_and_wake_up(world):
    engine = world.controller
    assert engine.status is Status.AWAKE and engine.guarded == world.guarded
    assert engine.generate(prompt="a") == {"text": "a!", "aborted": False}
    engine.sleep()
    assert engine.status is Status.ASLEEP and world.released == engine.released == ALL
    engine.wake_up("weights")
    assert engine.status is Status.WEIGHTS_ONLY and world.released == ALL - {"weights"}
    engine.check("update_weights")
    engine.wake_up("kv_cache")
    assert engine.status is Status.NO_GRAPHS and world.released == {"cuda_graph"}
    engine.wake_up()
    assert engine.status is Status.AWAKE and world.released == set()
    assert engine.generate(prompt="b")["text"] == "b!"


def test_released_tags_determine_the_status(make_world):
    world = make_world("local", guarded=False)
    for tags, status in [
        (["kv_cache"], Status.WEIGHTS_ONLY),
        (["kv_cache", "cuda_graph"], Status.WEIGHTS_ONLY),
        (["weights"], Status.NO_WEIGHTS),
        (["cuda_graph", "weights"], Status.NO_WEIGHTS),
        (["cuda_graph"], Status.NO_GRAPHS),
        (["weights", "kv_cache"], Status.ASLEEP),
    ]:
        world.controller.sleep(tags)
        assert world.controller.status is status and world.released == set(tags)
        world.controller.wake_up()
        assert world.controller.status is Status.AWAKE and world.released == set()


def test_calls_are_idempotent_and_report_skipped_tags(world):
    engine = world.controller
    assert engine.wake_up().steps == () and world.released == set()
    assert engine.sleep("weights").changed == ("weights",)
    report = engine.sleep()
    assert report.changed == ("kv_cache", "cuda_graph") and report.skipped == ("weights",)
    report = engine.sleep()
    assert report.steps == () and report.skipped == RELEASE_ORDER and report.bytes == 0
    assert engine.wake_up(["kv_cache", "weights"]).changed == ("weights", "kv_cache")
    assert engine.wake_up().skipped == ("weights", "kv_cache")
    assert world.released == set()


def test_reports_contain_seconds_and_bytes(make_world, kind):
    world = make_world(kind)
    report = world.controller.sleep()
    (rank,) = report.steps[-1].ranks
    assert rank.device_bytes == {"kv_cache": 8 * MIB, "weights": 4 * MIB, "cuda_graph": 2 * MIB}
    assert rank.copied_bytes["weights"] == 4 * MIB and rank.copied_bytes["kv_cache"] == 0
    assert report.bytes == 14 * MIB and 0 < rank.seconds <= report.seconds
    assert world.controller.wake_up("weights").bytes == 4 * MIB
    assert world.controller.wake_up().bytes == 10 * MIB


# --- calls that would crash the engine ------------------------------------------------------------


def test_generating_needs_all_tags(world):
    for tag in ALL:
        world.controller.sleep(tag)
        for stream in (False, True):
            with pytest.raises(InvalidStateError, match=tag):
                world.controller.generate(prompt="a", stream=stream)
        world.controller.wake_up(tag)
    world.controller.sleep("weights")
    with pytest.raises(InvalidStateError, match="update_weights"):
        world.controller.check("update_weights")
    world.controller.wake_up()
    with pytest.raises(ConfigError):
        world.controller.check("dance")


def test_a_busy_engine_does_not_sleep(world, in_thread, wait_until):
    world.manager.generate_seconds = 1.5
    request = in_thread(world.controller.generate, prompt="a")
    wait_until(lambda: world.scheduler.running)
    with pytest.raises(EngineBusyError):
        world.controller.sleep()
    with pytest.raises(EngineBusyError):
        world.controller.sleep(wait_idle=True, timeout=0.4)
    assert world.controller.status is Status.AWAKE and world.released == set()
    world.controller.sleep(wait_idle=True)
    assert world.released == ALL and request.result()["text"] == "a!"
    world.controller.wake_up()
    world.manager.generate_seconds = 0
    assert world.controller.generate(prompt="b")["text"] == "b!"


def test_requests_of_others_are_seen(world, in_thread):
    world.scheduler.running.add("somebody's")
    with pytest.raises(EngineBusyError):
        world.controller.sleep()
    assert world.released == set() and world.controller.status is Status.AWAKE
    sleeping = in_thread(world.controller.sleep, wait_idle=True)
    time.sleep(0.1)
    assert world.released == set()
    world.scheduler.running.clear()
    assert sleeping.result().changed == RELEASE_ORDER


def test_requests_are_aborted_on_request(world, in_thread, wait_until):
    world.manager.generate_seconds = 20
    request = in_thread(world.controller.generate, prompt="a")
    wait_until(lambda: world.scheduler.running)
    report = world.controller.sleep(abort=True)
    assert request.result()["aborted"] and world.released == ALL
    assert report.steps[0].name == "abort"


def test_no_request_slips_in_while_the_engine_goes_to_sleep(make_world, kind):
    # Several threads generate and sleep: each request is served or refused, and none is fatal.
    world = make_world(kind)
    served = refused = 0

    def requests():
        counts = [0, 0]
        for _ in range(40):
            try:
                world.controller.generate(prompt="a")
                counts[0] += 1
            except InvalidStateError:
                counts[1] += 1
                time.sleep(0.001)
        return counts

    threads = 3
    with ThreadPoolExecutor(threads) as pool:
        tasks = [pool.submit(requests) for _ in range(threads)]
        while not all(task.done() for task in tasks):
            world.controller.sleep(wait_idle=True)
            world.controller.wake_up()
        for task in tasks:
            served, refused = served + task.result()[0], refused + task.result()[1]
    assert 0 < served == world.scheduler.generated and served + refused == 40 * threads


def test_a_stream_counts_until_its_end(make_world):
    world = make_world("local")
    stream = world.controller.generate(prompt="a", stream=True)
    world.controller.sleep()  # the generation has not begun
    with pytest.raises(InvalidStateError):
        next(stream)
    world.controller.wake_up()
    stream = world.controller.generate(prompt="a", stream=True)
    assert next(stream)["text"] == "a!"
    with pytest.raises(EngineBusyError):
        world.controller.sleep()
    assert list(stream) == []
    world.controller.sleep()


def test_flush_where_only_weights_go(make_world, kind):
    world = make_world(kind)
    world.controller.sleep("weights")
    assert world.scheduler.flushed == 0
    world.controller.wake_up()
    world.controller.sleep("weights", flush=True)
    assert world.scheduler.flushed == 1


# --- context managers -----------------------------------------------------------------------------


def test_a_staged_wake_wakes_the_weights_first(world):
    world.controller.sleep()
    with world.controller.staged_wake() as reports:
        assert world.released == ALL - {"weights"} and len(reports) == 1
        world.controller.check("update_weights")
    assert world.released == set() and world.controller.status is Status.AWAKE
    assert [report.changed for report in reports] == [("weights",), ("cuda_graph", "kv_cache")]


def test_a_staged_wake_whose_update_fails_can_be_repeated(world):
    world.controller.sleep()
    with pytest.raises(LookupError), world.controller.staged_wake():
        raise LookupError
    assert world.released == ALL - {"weights"}
    assert world.controller.status is Status.WEIGHTS_ONLY
    with world.controller.staged_wake():
        pass
    assert world.released == set()


def test_asleep_wakes_only_the_tags_that_it_released(world):
    world.controller.sleep("cuda_graph")
    with pytest.raises(LookupError), world.controller.asleep(["kv_cache", "cuda_graph"]):
        assert world.released == {"kv_cache", "cuda_graph"}
        raise LookupError
    assert world.released == {"cuda_graph"}
