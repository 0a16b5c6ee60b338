"""Tests how the tokenizer manager handles requests to a sleeping engine, with a fake manager."""

from __future__ import annotations

import asyncio
import pickle
import types

import pytest
from sleeping_manager import (
    BOTH,
    EmbeddingReqInput,
    GenerateReqInput,
    Manager,
    ResumeMemoryOccupationReqInput,
    asleep,
    change,
    hooked,
    outputs,
    update,
)

import memsaver
from memsaver.integrations.engine import admission, shared_query
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.messages import Failure
from memsaver.integrations.sglang import admissions, hooks, unknown_requests
from memsaver.integrations.sglang.protocol import REWRITTEN, TOUCH

pytestmark = pytest.mark.usefixtures("manager_modules")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
async def test_a_refused_request_raises_before_it_is_sent(kind, stream):
    manager = await asleep()
    with pytest.raises(EngineAsleepError) as caught:
        await outputs(manager, kind("a", stream))
    assert caught.value.tags == BOTH and caught.value.status_code == 503
    assert ("embeddings" in str(caught.value)) == (kind is EmbeddingReqInput)
    assert caught.value.detail == str(caught.value) and manager.sent == []
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.tags, str(again)) == (
        type(caught.value),
        BOTH,
        str(caught.value),
    )
    await change(manager, "resume")
    assert len(await outputs(manager, kind("b", stream))) == (3 if stream else 1)


def test_a_manager_without_a_place_for_the_policy_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(hooks, "_missing", set())
    module = types.ModuleType("sglang.srt.managers.tokenizer_manager")
    module.TokenizerManager = type("TokenizerManager", (), {"__init__": Manager.__init__})
    for _ in range(2):
        hooks.install_in(module)
    assert sum("has no generate_request" in text for text in caplog.messages) == 1


async def test_each_engine_keeps_the_policy_of_its_start(policy):
    kind = hooked()
    policy("wake")
    first = kind()
    policy("wait", 0.1)
    second = kind()
    policy("refuse")
    for manager in (first, second):
        await change(manager, "release")
    assert await outputs(first, GenerateReqInput("a"))
    with pytest.raises(EngineAsleepError, match=r"no caller woke it up within 0\.1 s"):
        await outputs(second, GenerateReqInput("a"))


async def test_a_refusal_by_the_scheduler_raises_the_same_error():
    manager = Manager()
    manager.tags = {"kv_cache"}  # released by another process
    with pytest.raises(EngineAsleepError) as caught:
        await outputs(manager, GenerateReqInput("a"))
    assert caught.value.tags == ("kv_cache",)
    # A stream yields the refusal in SGLang's own format, because it may have begun.
    manager = Manager()
    manager.tags = {"kv_cache"}
    (output,) = await outputs(manager, GenerateReqInput("a", stream=True))
    assert output["meta_info"]["finish_reason"]["status_code"] == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["wait", "wake"])
async def test_a_request_that_a_release_overtakes_is_sent_again(policy, when, stream):
    policy(when)
    manager = await asleep()
    if when == "wait":
        await change(manager, "resume")
    overtaken = []

    def between():
        if not overtaken:
            overtaken.append(1)
            manager.tags = {"kv_cache"}
            if when == "wait":
                loop = asyncio.get_running_loop()
                loop.call_later(0.05, lambda: loop.create_task(change(manager, "resume")))

    manager.between = between
    found = await outputs(manager, GenerateReqInput("a", stream))
    assert [output["text"] for output in found] == (["0", "1", "2"] if stream else ["0"])
    assert len(manager.sent) == 2 and overtaken


@pytest.mark.parametrize("is_background, count", [(False, 0), (True, 1)])
async def test_a_disconnected_client_ends_only_a_foreground_request(
    policy, monkeypatch, is_background, count
):
    policy("wait")
    monkeypatch.setattr(admission, "_POLL_SECONDS", 0.01)

    class Gone:
        async def is_disconnected(self):
            return True

    manager = await asleep()
    obj = GenerateReqInput("a")
    obj.background = is_background
    task = asyncio.ensure_future(outputs(manager, obj, Gone()))
    await asyncio.sleep(0.05)
    await change(manager, "resume")
    await asyncio.wait([task])
    assert len(manager.sent) == count
    assert isinstance(task.exception(), type(None) if count else admission.ClientGoneError)


@pytest.mark.parametrize("poll", [0.01, 1.0])
@pytest.mark.parametrize("when", ["wait", "wake"])
@pytest.mark.parametrize("rid, abort_all", [("a", False), ("", True), ("other", False)])
async def test_an_abort_ends_a_request_that_is_held(
    policy, monkeypatch, when, rid, abort_all, poll
):
    """The abort ends the request even if the memory is resumed before the request checks for an
    abort.
    """
    policy(when)
    monkeypatch.setattr(admission, "_POLL_SECONDS", poll)
    manager = await asleep()
    if when == "wake":
        manager.failure = Failure("OutOfDeviceMemoryError", "no memory", "")
    task = asyncio.ensure_future(outputs(manager, GenerateReqInput("a")))
    await asyncio.sleep(0.02)
    admissions.abort(Manager.abort_request, manager, rid, abort_all)
    manager.failure = None
    if when == "wait" and (rid == "other" or poll == 1.0):
        await change(manager, "resume")
    if rid == "other":
        assert len(await task) == 1
    else:
        with pytest.raises(admission.RequestAbortedError):
            await task
        assert manager.sent == []


async def test_a_query_without_an_answer_in_time_is_not_cancelled(monkeypatch):
    """If a query were canceled, SGLang 0.5.12 would wait forever for its answer in each later
    query.
    """
    monkeypatch.setattr(shared_query, "QUERY_SECONDS", 0.01)
    manager = await asleep()
    query, answer = manager.get_internal_state, asyncio.Event()
    queries, completed = 0, 0

    async def slow():
        nonlocal queries, completed
        queries += 1
        await answer.wait()
        completed += 1
        return await query()

    manager.get_internal_state = slow
    for rid in "ab":
        with pytest.raises(EngineAsleepError):
            await outputs(manager, GenerateReqInput(rid))
    cancelled = asyncio.ensure_future(outputs(manager, GenerateReqInput("c")))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    manager.tags.clear()  # resumed by another process
    answer.set()
    await asyncio.sleep(0.05)
    assert queries == completed == 1
    assert await outputs(manager, GenerateReqInput("d"))


async def test_a_release_whose_caller_gives_up_is_known():
    manager = Manager()
    release = manager.release_memory_occupation_communicator

    async def slow(obj):
        await release(obj)
        await asyncio.Event().wait()

    manager.release_memory_occupation_communicator = slow
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(change(manager, "release"), 0.05)
    found = admissions.admission_of(manager)
    assert found.released == set(BOTH)
    with pytest.raises(EngineAsleepError):
        await outputs(manager, GenerateReqInput("a"))
    manager.tags.clear()  # resumed by another process
    assert await outputs(manager, GenerateReqInput("a")) and not found.released


async def test_weights_are_read_after_a_wake_up_from_the_engines_own_release(policy, monkeypatch):
    """The scheduler's reply to a refused read is None without a reason."""
    policy("wake")
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", "5")
    manager = Manager()
    manager.tags = {"weights"}

    async def get_weights_by_name(manager, obj):
        return None if manager.tags else [0.5]

    hook = admissions.call("read its weights")
    assert await hook(get_weights_by_name, manager, "a.weight") == [0.5]


@pytest.mark.parametrize(("seconds", "replicas", "touches"), [(5, 2, 1), (5, 1, 0), (0, 2, 0)])
async def test_no_replica_falls_asleep_between_the_query_and_an_update(
    policy, monkeypatch, seconds, replicas, touches
):
    policy("wake")
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", str(seconds))
    manager = Manager(dp_size=replicas)
    assert (await update(manager))[0]
    assert manager.asked == [TOUCH] * touches


async def test_a_wake_up_without_memory_is_the_requests_error(policy):
    policy("wake", 0.1)
    manager = await asleep()
    manager.failure = Failure("OutOfDeviceMemoryError", "8 MiB are needed", "kv_cache", 8, 1)
    with pytest.raises(EngineAsleepError, match="8 MiB are needed") as caught:
        await outputs(manager, GenerateReqInput("a"))
    assert isinstance(caught.value.__cause__, memsaver.OutOfDeviceMemoryError)
    assert manager.tags == set(BOTH)
    manager.failure = None
    assert await outputs(manager, GenerateReqInput("b"))


@pytest.mark.parametrize("rid", [None, REWRITTEN])
async def test_weights_without_a_backup_are_not_woken_for_a_generation(policy, rid):
    """The engine has no backup, or the weights were about to be rewritten."""
    policy("wake")
    manager = Manager(enable_weights_cpu_backup=rid is not None)
    await change(manager, "release", rid=rid)
    await change(manager, "release")  # of a sleeping engine
    with pytest.raises(EngineAsleepError, match="weights has no backup"):
        await outputs(manager, GenerateReqInput("a"))
    assert (await update(manager))[0] is True
    await change(manager, "resume")
    await change(manager, "release")
    if rid is not None:
        assert await outputs(manager, GenerateReqInput("a"))


@pytest.mark.parametrize("tags", [5, "weights"])
async def test_a_release_of_no_list_of_tags_is_not_recorded(tags):
    """The schedulers reject a release whose `tags` is not a list."""
    manager = Manager()
    sent = []

    async def refuse(obj):
        sent.append(obj.tags)
        raise asyncio.CancelledError

    manager.release_memory_occupation_communicator = refuse
    with pytest.raises(asyncio.CancelledError):
        await change(manager, "release", tags)
    assert sent == [tags] and admissions.admission_of(manager).released == set()


async def test_weights_that_another_process_discarded_are_not_woken(policy):
    """A different tokenizer worker has put the engine to sleep."""
    policy("wake")
    manager = Manager()
    manager.tags, manager.lost = set(BOTH), {"weights"}
    with pytest.raises(EngineAsleepError, match="weights has no backup"):
        await outputs(manager, GenerateReqInput("a"))
    await change(manager, "resume")
    assert await outputs(manager, GenerateReqInput("a"))


async def test_weights_that_were_saved_since_they_were_discarded_are_woken(policy):
    policy("wake")
    manager = Manager()
    await change(manager, "release", rid=REWRITTEN)
    assert (await update(manager))[0] is True
    with pytest.raises(EngineAsleepError, match="load all of weights, and resume the rest"):
        await outputs(manager, GenerateReqInput("a"))  # the update may not be complete
    await change(manager, "resume")
    manager.tags = set(BOTH)  # the idle engine sleeps by itself
    assert await outputs(manager, GenerateReqInput("a"))


@pytest.mark.parametrize("when", ["wait", "wake"])
async def test_a_health_check_neither_waits_nor_wakes_the_engine(policy, when):
    policy(when)
    manager = await asleep()
    with pytest.raises(EngineAsleepError):
        await outputs(manager, GenerateReqInput("HEALTH_CHECK_1"))
    assert manager.tags == set(BOTH)


async def test_requests_are_refused_even_if_the_scheduler_has_no_guard():
    """A scheduler without the guard reports no state but answers releases and resumes."""
    manager = Manager()

    async def states():
        return [{}]

    manager.get_internal_state = states
    await change(manager, "release")
    with pytest.raises(EngineAsleepError) as caught:
        await outputs(manager, GenerateReqInput("a"))
    assert caught.value.tags == BOTH and manager.sent == []
    with pytest.raises(EngineAsleepError):
        await update(manager)
    await change(manager, "resume")
    assert await outputs(manager, GenerateReqInput("a")) and (await update(manager))[0] is True


async def test_nothing_is_refused_without_a_memory_saver():
    manager = await asleep(enable_memory_saver=False)
    manager.tags.clear()  # such a release has no effect
    assert await outputs(manager, GenerateReqInput("a"))
    assert (await update(manager))[0] is True


async def test_other_failures_of_an_update_are_returned():
    manager = Manager()

    async def failing(manager, obj):
        return False, "the model does not use a.weight"

    hook = admissions.call("update its weights", reads=False)
    assert await hook(failing, manager, "x") == (False, "the model does not use a.weight")
    manager.tags = {"weights"}
    with pytest.raises(EngineAsleepError, match="cannot update its weights"):
        await update(manager)


class DrainReqInput:
    """A request type that no known version of SGLang defines."""


class Communicator:
    """SGLang's class with memsaver's hooks, which sends one request at a time and awaits its
    reply.
    """

    def __init__(self, is_older, deliver):
        self._is_older, self._deliver = is_older, deliver
        self._lock = asyncio.Lock()
        self._result_event = self._result_values = None

    async def _call(self, obj):
        await self._lock.acquire()
        self._deliver(obj)
        self._result_event, self._result_values = asyncio.Event(), []
        try:
            await self._result_event.wait()
        except asyncio.CancelledError:
            if not self._is_older:  # SGLang 0.5.11 stays busy with a cancelled request
                self._lock.release()
            raise
        values, self._result_event, self._result_values = self._result_values, None, None
        self._lock.release()
        return values

    def _handle_recv(self, reply):
        if self._is_older or self._result_values is not None:
            self._result_values.append(reply)  # in SGLang 0.5.12, an exception kills the process
            self._result_event.set()

    def __call__(self, obj):
        return unknown_requests.call(Communicator._call, self, obj)

    def handle_recv(self, reply):
        unknown_requests.receive(Communicator._handle_recv, self, reply)


@pytest.mark.parametrize("is_older", [False, True])
async def test_a_request_of_an_unknown_kind_raises_instead_of_waiting(monkeypatch, is_older):
    monkeypatch.setattr(unknown_requests, "_POLL_SECONDS", 0.01)
    manager, delivered = Manager(), []
    manager.drain_communicator = drain = Communicator(is_older, delivered.append)
    assert unknown_requests.attach("result", manager) == "result"

    # Awake: it waits for its reply.
    waiting = asyncio.ensure_future(drain(DrainReqInput()))
    await asyncio.sleep(0.1)
    drain.handle_recv("a reply")
    assert await waiting == ["a reply"] and len(delivered) == 1

    # A release overtakes it, and the scheduler cannot reply. A second one has not been sent yet.
    waiting = [asyncio.ensure_future(drain(DrainReqInput())) for _ in range(2)]
    await asyncio.sleep(0.1)
    manager.tags = {"weights"}
    for one in waiting:
        with pytest.raises(EngineAsleepError, match="cannot process DrainReqInput") as caught:
            await one
        assert caught.value.tags == ("weights",) and len(delivered) == 2
    drain.handle_recv("a late reply")  # has no effect

    # Asleep: it is not sent, but requests of known kinds are.
    with pytest.raises(EngineAsleepError, match="cannot process DrainReqInput") as caught:
        await drain(DrainReqInput())
    assert caught.value.status_code == 503 and len(delivered) == 2
    waiting = asyncio.ensure_future(drain(ResumeMemoryOccupationReqInput()))
    await asyncio.sleep(0.05)
    drain.handle_recv("resumed")
    assert await waiting == ["resumed"]

    # Awake again: later requests are served, and a caller that gives up cancels its request.
    manager.tags = set()
    waiting = asyncio.ensure_future(drain(DrainReqInput()))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    waiting = asyncio.ensure_future(drain(DrainReqInput()))
    await asyncio.sleep(0.05)
    drain.handle_recv("a reply")
    assert await waiting == ["a reply"]


async def test_requests_of_unknown_kinds_pass_without_a_memory_saver():
    manager = Manager(enable_memory_saver=False)
    manager.drain_communicator = drain = Communicator(False, lambda obj: None)
    unknown_requests.attach(None, manager)
    manager.tags = {"weights"}
    waiting = asyncio.ensure_future(drain(DrainReqInput()))
    await asyncio.sleep(0.05)
    drain.handle_recv("a reply")
    assert await waiting == ["a reply"]
