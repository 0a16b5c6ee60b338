"""Tests that an idle scheduler releases its memory after a given time, with a fake clock."""

from __future__ import annotations

import types

import fake_sglang
import pytest
from fake_sglang import messages
from scheduler_calls import ask, states

from memsaver.integrations.sglang import hooks
from memsaver.integrations.sglang.guard import Guard
from memsaver.integrations.sglang.idle_sleep import IdleRelease, IdleSleep, install, with_handler
from memsaver.integrations.sglang.protocol import TOUCH
from memsaver.integrations.sglang.unguarded import FAILED

GENERATION = messages.TokenizedGenerateReqInput("a")
HEALTH = messages.TokenizedGenerateReqInput("HEALTH_CHECK_1")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scheduler():
    found = fake_sglang.Scheduler()
    found.server_args = types.SimpleNamespace(enable_weights_cpu_backup=True)
    return found


@pytest.fixture
def idle(scheduler, clock):
    return IdleSleep(scheduler, 5, clock=clock)


def advance(clock, idle, seconds, received=()):
    """Advance the clock in steps; the first step receives the requests.

    Return the resulting releases.
    """
    found = []
    for number in range(round(seconds / 0.25)):
        clock.now += 0.25
        handled = idle.handle(list(received) if number == 0 else [])
        found += [one for one in handled if isinstance(one, IdleRelease)]
    return found


def test_an_idle_scheduler_releases_memory_after_the_time(clock, scheduler, idle):
    assert advance(clock, idle, 4.5) == []
    assert advance(clock, idle, 1) == [IdleRelease(("kv_cache", "weights"))]
    scheduler.weight_updater.offload_tags = {"kv_cache", "weights"}
    assert advance(clock, idle, 20) == []
    scheduler.weight_updater.offload_tags = set()  # woken
    assert len(advance(clock, idle, 6)) == 1


def test_requests_and_a_pause_postpone_the_release(clock, scheduler, idle):
    for _ in range(5):
        assert advance(clock, idle, 4, [GENERATION]) == []
    scheduler.begin("a")  # a long generation
    assert advance(clock, idle, 30, [GENERATION]) == []
    scheduler.end("a")
    assert advance(clock, idle, 4.5) == []
    idle.handle([GENERATION])
    clock.now += 60  # the scheduler handles the request
    assert advance(clock, idle, 4.5) == []
    scheduler._engine_paused = True
    assert advance(clock, idle, 30) == []


def test_monitoring_does_not_restart_the_idle_time(clock, scheduler, idle):
    found = []
    for _ in range(4):
        scheduler.begin("HEALTH_CHECK_1")  # the check generates its token
        found += advance(clock, idle, 1, [HEALTH, messages.GetInternalStateReq()])
        scheduler.end("HEALTH_CHECK_1")
        found += advance(clock, idle, 1)
    assert len(found) == 1


def test_a_query_before_an_update_restarts_the_idle_time(clock, idle):
    query = messages.GetInternalStateReq()
    query.rid = TOUCH
    for _ in range(4):
        assert advance(clock, idle, 4, [query]) == []


@pytest.mark.parametrize(
    ("has_backup", "graphs", "tags"),
    [(False, "0", ("kv_cache",)), (True, "1", ("kv_cache", "weights", "cuda_graph"))],
)
def test_only_memory_whose_contents_return_is_released(
    clock, scheduler, monkeypatch, has_backup, graphs, tags
):
    scheduler.server_args.enable_weights_cpu_backup = has_backup
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", graphs)
    assert advance(clock, IdleSleep(scheduler, 5, clock=clock), 6) == [IdleRelease(tags)]


def test_only_the_rank_that_receives_requests_measures_the_time(clock, scheduler, idle):
    clock.now += 100
    assert idle.handle(None) is None
    scheduler.ps = types.SimpleNamespace(pp_rank=1)
    idle = IdleSleep(scheduler, 5, clock=clock)
    clock.now += 100
    assert idle.handle([]) == []


@pytest.mark.parametrize("is_local, kind", [(False, IdleSleep), (True, type(None))])
def test_ranks_that_receive_control_requests_by_themselves_do_not_sleep(
    scheduler, monkeypatch, caplog, is_local, kind
):
    """All data-parallel ranks must release memory together, but the other ranks would not
    participate."""
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP", "wake")
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", "5")
    scheduler.server_args.enable_dp_attention = True
    scheduler.server_args.enable_dp_attention_local_control_broadcast = is_local
    scheduler.memory_saver_adapter = types.SimpleNamespace(enabled=True)
    scheduler.input_blocker = None
    install(None, scheduler)
    assert type(scheduler.input_blocker) is kind
    assert ("local_control_broadcast" in caplog.text) == is_local


def test_sglangs_own_input_blocker_comes_first(clock, scheduler):
    inner = types.SimpleNamespace(handle=lambda requests: [*requests, "unblocked"])
    assert IdleSleep(scheduler, 5, inner, clock).handle(["a"]) == ["a", "unblocked"]


@pytest.fixture
def sleeper(sglang, clock):
    """Return a scheduler with an `IdleSleep` that has no request dispatcher yet."""
    scheduler = sglang.Scheduler(sglang.Updater)
    scheduler.server_args = types.SimpleNamespace(enable_weights_cpu_backup=True)
    inner = types.SimpleNamespace(handle=lambda requests: requests)
    scheduler.input_blocker = IdleSleep(scheduler, 5, inner, clock)
    scheduler._dispatch = Dispatcher([])
    return scheduler


def test_an_engine_without_a_guard_does_not_sleep(sleeper, monkeypatch, clock):
    """Without a guard, the first request after the release would crash the engine."""
    monkeypatch.delattr("sglang.srt.managers.io_struct.AbortReq")
    sleeper.init_request_dispatcher()
    assert isinstance(sleeper._request_dispatcher, Dispatcher)
    assert advance(clock, sleeper.input_blocker, 20) == []


@pytest.mark.parametrize("reason, kind", [(None, IdleSleep), ("not found", type(None))])
@pytest.mark.usefixtures("waking")
def test_only_an_engine_with_a_guard_sleeps_when_idle(monkeypatch, scheduler, reason, kind):
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", "5")
    if reason is not None:
        monkeypatch.setattr(type(scheduler), FAILED, reason, raising=False)
    scheduler.memory_saver_adapter = types.SimpleNamespace(enabled=True)
    scheduler.input_blocker = None
    place = f"{hooks._SCHEDULER}.init_watch_dog_memory_saver_input_blocker"
    assert hooks._hooks_of_requests()[place][1]("result", scheduler) == "result"
    assert type(scheduler.input_blocker) is kind


@pytest.mark.usefixtures("waking")
@pytest.mark.parametrize("server", ["Rust", "gRPC"])
def test_an_engine_whose_server_cannot_wake_it_does_not_sleep(sleeper, clock, caplog, server):
    """These servers of SGLang have no tokenizer manager."""
    if server == "Rust":
        sleeper.rust_server = object()
    else:
        sleeper.server_args.smg_grpc_mode = True
    sleeper.init_request_dispatcher()
    assert isinstance(sleeper._request_dispatcher, Guard)
    assert advance(clock, sleeper.input_blocker, 20) == [] and server in caplog.text


class Dispatcher:
    """A fake of SGLang's dispatcher, which selects handlers by the request's type."""

    def __init__(self, pairs) -> None:
        self.handlers = dict(pairs)

    def __iadd__(self, other):
        self.handlers.update(other.handlers)
        return self

    def __call__(self, request):
        return self.handlers[type(request)](request)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.12"])
def test_an_idle_release_releases_memory_and_sends_no_reply(engine):
    engine.server_args = types.SimpleNamespace(enable_weights_cpu_backup=True)
    dispatcher = Dispatcher([])
    assert with_handler(engine, dispatcher) is dispatcher and not dispatcher.handlers
    engine.input_blocker = IdleSleep(engine, 5)
    with_handler(engine, dispatcher)
    engine.begin("a")
    assert dispatcher(IdleRelease(("kv_cache", "weights"))) is None  # it is busy, and logs that
    assert set(states().values()) == {"mapped"}
    engine.end("a")
    assert dispatcher(IdleRelease(("kv_cache", "weights"))) is None
    assert states()["weights"] == states()["kv_cache"] == "paused" and engine.sent == []
    ask(engine, "resume")
    assert engine.model.is_intact()
