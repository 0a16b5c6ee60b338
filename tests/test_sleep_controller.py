"""The controller's contract, over an engine object and over a server, with the plugin and without.

With the plugin the stand-in's schedulers are on memsaver, on the simulated driver; without it they
are on another saver. Neither survives what SGLang would not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sglang_stand_in as stand_in
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import memsaver
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.sglang import hooks
from memsaver.integrations.sglang.engines import connect
from memsaver.integrations.sglang.errors import EngineBusyError, EngineError, EngineTimeoutError
from memsaver.integrations.sglang.protocol import RELEASE_ORDER, RESUME_ORDER
from memsaver.integrations.sglang.sleep import SleepController
from memsaver.integrations.sglang.status import Status

MIB = 1 << 20
ALL = frozenset(stand_in.TAGS)


class World:
    """An engine, what it really holds, and a controller for it."""

    def __init__(self, manager, target, guarded: bool, sim=None) -> None:
        self.manager, self.target, self.guarded, self.sim = manager, target, guarded, sim
        self.scheduler = manager.schedulers[0]
        self.controller = SleepController(target, timeout=5)

    @property
    def released(self) -> frozenset[str]:
        """The truth: as the scheduler and the saver see it."""
        updater = self.scheduler.weight_updater
        if self.guarded:
            paused = {tag for tag in ALL if memsaver.state(tag) == "paused"}
        else:
            paused = updater.memory_saver_adapter.paused
        assert paused == updater.offload_tags
        return frozenset(paused)

    @contextlib.contextmanager
    def full(self):
        """No room for a resume."""
        if self.guarded:
            self.sim.occupy((80 << 30) - self.sim.physical())
            try:
                yield
            finally:
                self.sim.occupy(0)
        else:
            self.scheduler.weight_updater.memory_saver_adapter.full = True
            yield

    def check_alive(self) -> None:
        assert [s.death for s in self.manager.schedulers] == [None] * len(self.manager.schedulers)


@pytest.fixture
def make_world(monkeypatch, sim, tag, make_blocks):
    """Makes worlds: `make_world("local" | "server", guarded=True)`."""

    def forget(processes):
        for process in processes:
            process.model = process.blocks = None

    with contextlib.ExitStack() as cleanup:

        def make(kind: str, guarded: bool = True, schedulers: int = 1) -> World:
            classes = cleanup.enter_context(stand_in.modules(monkeypatch))
            if guarded:
                hooks.install()
            processes = [classes.Scheduler(classes.Updater) for _ in range(schedulers)]
            if guarded and schedulers == 1:
                tag.names.extend(stand_in.TAGS)
                processes[0].model = make_blocks("weights", [2 * MIB], backup="host")[0]
                processes[0].blocks = [
                    make_blocks("kv_cache", [4 * MIB], backup="none"),
                    make_blocks("cuda_graph", [2 * MIB], backup="host"),
                ]
            manager = classes.Tokenizer(processes)
            engine = (stand_in.Engine if kind == "local" else stand_in.Server)(manager)
            cleanup.callback(engine.shutdown)
            cleanup.callback(forget, processes)
            return World(manager, engine if kind == "local" else engine.url, guarded, sim)

        yield make


@pytest.fixture(params=["local", "server"])
def kind(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["guarded", "bare"])
def world(request, kind, make_world):
    world = make_world(kind, request.param)
    yield world
    world.check_alive()


# --- states ---------------------------------------------------------------------------------------


def test_the_whole_cycle(world):
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


def test_parts_of_an_engine(make_world):
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


def test_calls_are_idempotent_and_say_what_they_left_out(world):
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


def test_bad_tags_never_reach_the_engine(world):
    for call in (world.controller.sleep, world.controller.wake_up):
        with pytest.raises(ConfigError, match="None means all"):
            call([])
        with pytest.raises(ConfigError, match="optimizer"):
            call(["weights", "optimizer"])
    assert world.released == set()


def test_reports_tell_seconds_and_bytes(make_world, kind):
    world = make_world(kind)
    report = world.controller.sleep()
    (rank,) = report.steps[-1].ranks
    assert rank.device_bytes == {"kv_cache": 4 * MIB, "weights": 2 * MIB, "cuda_graph": 2 * MIB}
    assert rank.copied_bytes["weights"] == 2 * MIB and rank.copied_bytes["kv_cache"] == 0
    assert report.bytes == 8 * MIB and 0 < rank.seconds <= report.seconds
    assert world.controller.wake_up("weights").bytes == 2 * MIB
    assert world.controller.wake_up().bytes == 6 * MIB


# --- what would end the engine --------------------------------------------------------------------


def test_generating_needs_everything(world):
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
    world.manager.generate_seconds = 0.4
    request = in_thread(world.controller.generate, prompt="a")
    wait_until(lambda: world.scheduler.running)
    with pytest.raises(EngineBusyError):
        world.controller.sleep()
    with pytest.raises(EngineBusyError):
        world.controller.sleep(wait_idle=True, timeout=0.05)
    assert world.controller.status is Status.AWAKE and world.released == set()
    world.controller.sleep(wait_idle=True)
    assert world.released == ALL and request.result()["text"] == "a!"
    world.controller.wake_up()
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


def test_requests_are_aborted_where_asked_to(world, in_thread, wait_until):
    world.manager.generate_seconds = 20
    request = in_thread(world.controller.generate, prompt="a")
    wait_until(lambda: world.scheduler.running)
    report = world.controller.sleep(abort=True)
    assert request.result()["aborted"] and world.released == ALL
    assert report.steps[0].name == "abort"


def test_no_request_slips_in_while_the_engine_goes_to_sleep(make_world, kind):
    # Generations and sleeps of several threads: each request is served or refused, none is fatal.
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
    world.check_alive()
    assert 0 < served == world.scheduler.generated and served + refused == 40 * threads


def test_a_stream_counts_until_its_end(make_world):
    world = make_world("local")
    stream = world.controller.generate(prompt="a", stream=True)
    world.controller.sleep()  # it has not begun
    with pytest.raises(InvalidStateError):
        next(stream)
    world.controller.wake_up()
    stream = world.controller.generate(prompt="a", stream=True)
    assert next(stream)["text"] == "a!"
    with pytest.raises(EngineBusyError):
        world.controller.sleep()
    assert list(stream) == []
    world.controller.sleep()
    world.check_alive()


def test_flush_where_only_weights_go(make_world, kind):
    world = make_world(kind)
    world.controller.sleep("weights")
    assert world.scheduler.flushed == 0
    world.controller.wake_up()
    world.controller.sleep("weights", flush=True)
    assert world.scheduler.flushed == 1


# --- context managers -----------------------------------------------------------------------------


def test_staged_wake(world):
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


def test_asleep_wakes_what_it_put_to_sleep(world):
    world.controller.sleep("cuda_graph")
    with pytest.raises(LookupError), world.controller.asleep(["kv_cache", "cuda_graph"]):
        assert world.released == {"kv_cache", "cuda_graph"}
        raise LookupError
    assert world.released == {"cuda_graph"}


# --- failures -------------------------------------------------------------------------------------


def test_a_wake_without_room_fails_and_the_next_one_works(make_world, kind, caplog):
    world = make_world(kind)
    world.controller.sleep()
    for tags in (None, "weights", None):
        with world.full(), pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
            world.controller.wake_up(tags)
        assert caught.value.needed > caught.value.free and "rank 0 of 1" in str(caught.value)
        assert world.controller.status is Status.ASLEEP and world.released == ALL
    world.controller.wake_up()
    assert world.released == set() and world.scheduler.model.is_intact()
    assert world.controller.generate(prompt="a")["text"] == "a!"
    world.check_alive()
    del caught
    gc.collect()
    assert "never retrieved" not in caplog.text  # the error was the caller's


def test_what_a_failed_wake_left_mapped_goes_with_the_next_sleep(make_world, kind):
    world = make_world(kind)
    world.controller.sleep()
    updater = world.scheduler.weight_updater
    updater.resume_errors["after kv_cache"] = RuntimeError("no queue")
    with world.sim.fault("cuMemUnmap"), pytest.raises(EngineError, match="could not give it back"):
        world.controller.wake_up()
    assert world.controller.status is Status.ASLEEP and world.sim.tag_bytes() == 8 * MIB
    with pytest.raises(InvalidStateError):
        world.controller.generate(prompt="a")
    report = world.controller.sleep()
    assert report.bytes == 8 * MIB and world.sim.tag_bytes() == 0
    assert world.controller.sleep().steps == ()
    updater.resume_errors.clear()
    world.controller.wake_up()
    assert world.released == set() and world.scheduler.model.is_intact()
    world.check_alive()


def test_a_staged_wake_without_room_for_the_rest(make_world, kind):
    world = make_world(kind)
    world.controller.sleep()
    with pytest.raises(memsaver.OutOfDeviceMemoryError), contextlib.ExitStack() as stack:
        stack.enter_context(world.controller.staged_wake())
        world.sim.occupy((80 << 30) - world.sim.physical())
    assert world.controller.status is Status.WEIGHTS_ONLY and world.scheduler.model.is_intact()
    world.sim.occupy(0)
    world.controller.wake_up()
    world.check_alive()


def test_a_server_that_hides_an_error(make_world):
    # As one whose HTTP workers do not load plugins.
    world = make_world("server")
    server = stand_in.Server(world.manager)
    server.swallow_errors = True
    try:
        controller = SleepController(server.url)
        controller.sleep()
        with world.full(), pytest.raises(memsaver.OutOfDeviceMemoryError):
            controller.wake_up()
        assert controller.status is Status.ASLEEP and world.released == ALL
        controller.wake_up()
        assert world.released == set()
    finally:
        server.shutdown()


def test_a_server_that_cannot_tell_what_a_release_did(make_world):
    world = make_world("server")
    server = stand_in.Server(world.manager)
    try:
        controller = SleepController(server.url, timeout=5)
        engine_release = controller._engine.release

        def release(tags, timeout):
            answers = engine_release(tags, timeout)
            server.failing_infos = 1
            return answers

        controller._engine.release = release
        with pytest.raises(EngineError, match="500"):
            controller.sleep()
        assert world.released == ALL and controller.status is Status.UNKNOWN
        with pytest.raises(InvalidStateError, match="unknown"):
            controller.generate(prompt="a")
        assert controller.sleep().skipped == RELEASE_ORDER  # it asks again
        assert controller.status is Status.ASLEEP
        controller.wake_up()
        assert controller.generate(prompt="a")["text"] == "a!"
        world.check_alive()
    finally:
        server.shutdown()


def test_a_sleep_that_fails_leaves_the_engine_awake(make_world, kind):
    world = make_world(kind)
    with world.sim.fault("cuMemUnmap"), pytest.raises(memsaver.DriverError):
        world.controller.sleep()
    assert world.controller.status is Status.AWAKE and world.released == set()
    assert world.controller.generate(prompt="a")["text"] == "a!"
    world.controller.sleep()
    assert world.released == ALL
    world.check_alive()


def test_an_engine_that_dies(make_world, kind):
    world = make_world(kind, guarded=False)
    world.controller.sleep()
    with world.full(), pytest.raises(EngineTimeoutError):
        world.controller.wake_up(timeout=0.3)
    assert world.scheduler.death is not None
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
        world.controller._ask("release", ["weights"], time.monotonic() + 0.1)
    assert world.controller.status is Status.UNKNOWN
    world.manager.answer_seconds = 0.0
    world.controller.refresh()  # what it did is done by now, or never is
    assert world.controller.released == world.released
    world.controller.sleep()
    assert world.released == ALL
    world.controller.wake_up()
    world.check_alive()


@pytest.mark.parametrize("operation", ["sleep", "wake_up"])
def test_the_timeout_is_for_all_of_a_call(make_world, kind, operation):
    world = make_world(kind)
    if operation == "wake_up":
        world.controller.sleep()
    before = world.released
    world.manager.answer_seconds = 2.0  # longer than the call may take, shorter than 5 s
    call = getattr(world.controller, operation)
    started = time.monotonic()
    with pytest.raises(EngineTimeoutError):
        call(timeout=0.3)
    assert time.monotonic() - started < 1.0
    world.manager.answer_seconds = 0.2  # enough for one question of those that it takes
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
    world.check_alive()


def test_a_call_waits_for_another_ones_turn_no_longer_than_its_timeout(make_world, in_thread):
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
    world.check_alive()


def test_no_server(make_world):
    with pytest.raises(EngineError, match="cannot be reached"):
        SleepController("http://127.0.0.1:9", timeout=1)
    world = make_world("server")
    world.controller.sleep()
    server = stand_in.Server(world.manager)
    controller = SleepController(server.url, timeout=1)
    server.shutdown()
    with pytest.raises(EngineError):
        controller.wake_up()
    assert world.released == ALL


def test_an_engine_that_was_shut_down(make_world):
    world = make_world("local")
    engine = stand_in.Engine(world.manager)
    controller = SleepController(engine)
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        controller.sleep()


def test_an_api_key(make_world):
    world = make_world("server")
    server = stand_in.Server(world.manager, api_key="secret")
    try:
        with pytest.raises(EngineError, match="401") as caught:
            SleepController(server.url)
        assert caught.value.http_status == 401
        SleepController(server.url, api_key="secret").sleep()
        assert world.released == ALL
    finally:
        server.shutdown()


def test_what_is_no_engine():
    for engine in ("localhost:30000", object(), None):
        with pytest.raises(ConfigError):
            connect(engine)


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


def test_inside_an_event_loop(make_world):
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


def test_replicas_that_differ(make_world, kind):
    # Of two data-parallel schedulers one has its weights released, as after half a failure.
    world = make_world(kind, schedulers=2)
    first, second = world.manager.schedulers
    first.handle(
        "release_memory_occupation", stand_in.ReleaseMemoryOccupationReqInput(tags=["weights"])
    )
    assert world.controller.refresh() is Status.NO_WEIGHTS
    world.controller.sleep("weights")
    assert [s.weight_updater.offload_tags for s in (first, second)] == [{"weights"}] * 2
    second.handle("resume_memory_occupation", stand_in.ResumeMemoryOccupationReqInput())
    with pytest.raises(InvalidStateError):
        world.controller.generate(prompt="a")
    world.controller.wake_up()
    assert [s.weight_updater.offload_tags for s in (first, second)] == [set()] * 2
    assert world.controller.generate(prompt="a")["text"] == "a!"


@pytest.mark.parametrize("kind", ["server"])  # whose loop runs between the calls, as an engine's
def test_late_replies_are_not_taken_for_anothers(make_world, kind):
    world = make_world(kind, schedulers=2)
    manager, first = world.manager, world.scheduler
    # The second one's replies to three questions come together, after the first one's are lost.
    manager.slow = {1: 0.6}
    for _ in range(3):
        with pytest.raises(EngineTimeoutError):
            world.controller._engine.states(0.1)
    first.handle(
        "release_memory_occupation", stand_in.ReleaseMemoryOccupationReqInput(tags=["weights"])
    )
    manager.slow = {0: 0.5}
    assert world.controller.refresh() is Status.NO_WEIGHTS
    assert world.controller.released == {"weights"}
    with pytest.raises(InvalidStateError, match="weights"):
        world.controller.generate(prompt="a")
    manager.slow = {}
    world.controller.wake_up()
    world.check_alive()


def test_late_answers_are_not_taken_for_those_to_the_next_call(make_world, kind):
    world = make_world(kind, schedulers=2)
    manager, (first, second) = world.manager, world.manager.schedulers
    everywhere = [s.weight_updater for s in (first, second)]
    manager.slow = {1: 0.4}
    with pytest.raises(EngineTimeoutError):
        world.controller._ask("release", ["kv_cache"], time.monotonic() + 0.1)
    # Now the second one answers twice, to this call and to the one before, and the first one later.
    manager.slow = {0: 0.8}
    world.controller._ask("release", ["weights"], time.monotonic() + 5)
    assert [u.offload_tags for u in everywhere] == [{"kv_cache", "weights"}] * 2
    assert world.controller.released == {"kv_cache", "weights"}
    manager.slow = {}
    world.controller.wake_up()
    assert [u.offload_tags for u in everywhere] == [set()] * 2
    assert world.controller.generate(prompt="a")["text"] == "a!"
    world.check_alive()


def test_replies_that_never_fit_leave_the_state_unknown(make_world):
    world = make_world("local", schedulers=2)
    ask = world.controller._engine.states
    world.controller._engine.states = lambda timeout: ask(timeout)[:1] * 2
    with pytest.raises(EngineError, match="one of each"):
        world.controller.sleep()
    with pytest.raises(EngineError, match="one of each"):
        world.controller.refresh()
    assert world.controller.status is Status.UNKNOWN
    del world.controller._engine.states
    world.controller.sleep()
    assert world.controller.status is Status.ASLEEP
    world.controller.wake_up()
    world.check_alive()


# --- any order ------------------------------------------------------------------------------------

_TAGS = st.one_of(
    st.none(), st.sampled_from(stand_in.TAGS), st.lists(st.sampled_from(stand_in.TAGS), max_size=3)
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
        max_examples=40,
        deadline=None,
        # What targeting imports is parsed while other threads parse, which Python 3.11.7 may take
        # for an error of its own (AST constructor recursion depth mismatch).
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
            world.check_alive()
            assert engine.released == world.released
        engine.wake_up()
        assert engine.generate(prompt="a")["text"] == "a!"

    run()


def test_importing_it_imports_neither_torch_nor_sglang(tmp_path):
    code = (
        "import sys, memsaver.integrations.sglang.sleep, memsaver.integrations.sglang.hooks\n"
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_the_orders_are_sglangs():
    assert tuple(reversed(RELEASE_ORDER)) == ("cuda_graph", "weights", "kv_cache") == RESUME_ORDER
    assert set(itertools.chain(RELEASE_ORDER)) == ALL
