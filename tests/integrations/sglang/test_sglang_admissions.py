"""Test requests to a sleeping engine in the tokenizer manager, with a fake manager."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import sleeping_manager
from sleeping_manager import (
    BOTH,
    EmbeddingReqInput,
    GenerateReqInput,
    Manager,
    asleep,
    change,
    outputs,
    update,
)

import memsaver
from memsaver.integrations.engine import admission
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.messages import Failure
from memsaver.integrations.engine.refusals import asleep_text
from memsaver.integrations.sglang import admissions
from memsaver.integrations.sglang.protocol import REWRITTEN

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


class Batches(Manager):
    """A manager of two schedulers, of which one sleeps and refuses a part of the first batch.

    Args:
        aborts: whether it aborts the parts of a request that fails, as SGLang 0.5.23 does.
    """

    def __init__(self, aborts: bool = False) -> None:
        super().__init__()
        self.aborts = aborts
        self.ended: list[str] = []
        self.waiting: list[asyncio.Future] = []  # the parts' own tasks
        self.refused = lambda: None  # called after the refusal

    async def generate_request(self, obj, request=None):
        assert not set(obj.rid) & set(self.rid_to_state), "Duplicate request ID detected"
        self.rid_to_state |= {rid: asyncio.Event() for rid in obj.rid}
        self.sent.append(obj)
        try:
            async for output in self._parts(obj):
                yield output
        except BaseException as error:
            if self.aborts:
                admissions.release_states(Batches._release, self, obj)
            elif isinstance(error, Exception):
                admissions.discard_pending(Batches._discard, self, obj)
            raise

    async def _parts(self, obj):
        refused, accepted = obj.rid
        if not self.tags:
            yield [{"text": rid} for rid in obj.rid]
        elif getattr(obj, "parallel_sample_num", 1) == 1:
            self.waiting.append(asyncio.ensure_future(self.rid_to_state[accepted].wait()))
        del self.rid_to_state[refused]
        self.refused()
        if self.tags:
            text = asleep_text(self.tags, "generate")
            output = {"meta_info": {"finish_reason": {"type": "abort", "message": text}}}
            own = sleeping_manager.own_abort_reason
            yield await admissions.abort_reason(own, self, output, obj.stream)
        del self.rid_to_state[accepted]

    def _discard(self, obj):
        for rid in obj.rid:
            self.rid_to_state.pop(rid, None)

    def _release(self, obj):
        for rid in obj.rid:
            self.abort_request(rid)

    def abort_request(self, rid):
        """SGLang's method with memsaver's hook."""
        admissions.abort(Batches._abort, self, rid)

    def _abort(self, rid, abort_all):
        if rid not in self.rid_to_state or rid in self.aborted:
            return
        self.aborted.append(rid)
        asyncio.get_running_loop().call_later(0.1, self._answer_abort, rid)

    def _answer_abort(self, rid):
        self.rid_to_state.pop(rid).set()  # a KeyError here ends the server in SGLang 0.5.12
        self.ended.append(rid)


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_accepted_parts_of_a_refused_batch_end_before_it_is_sent_again(
    policy, stream, aborts
):
    policy("wake")
    manager = Batches(aborts)
    manager.tags = {"kv_cache"}
    obj = GenerateReqInput(["a", "b"], stream, is_single=False)
    found = admissions.generate(Batches.generate_request, manager, obj)
    assert [output async for output in found] == [[{"text": "a"}, {"text": "b"}]]
    assert manager.ended == ["b"] and len(manager.sent) == 2 and not manager.rid_to_state
    assert all(part.done() for part in manager.waiting)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rid", ["a", "b"])
@pytest.mark.parametrize("seconds", [None, 0.0, 0.05])
async def test_a_batch_that_is_aborted_while_its_accepted_parts_end_is_not_sent_again(
    policy, stream, rid, seconds
):
    """The client aborts it after the refusal, before the schedulers have ended these parts."""
    policy("wake")
    manager = Batches()
    manager.tags = {"kv_cache"}

    def refused():
        if seconds is None:
            manager.abort_request(rid)
        else:
            asyncio.get_running_loop().call_later(seconds, manager.abort_request, rid)

    manager.refused = refused
    obj = GenerateReqInput(["a", "b"], stream, is_single=False)
    with pytest.raises(admission.RequestAbortedError):
        await anext(admissions.generate(Batches.generate_request, manager, obj))
    assert manager.ended == ["b"] and len(manager.sent) == 1 and not manager.rid_to_state


class Part(GenerateReqInput):
    """A batch whose prompts can be sent alone, as in SGLang."""

    def __getitem__(self, at):
        return Part(self.rid[at], self.stream)


class Streams(Manager):
    """A manager whose second scheduler is released after the first output of a streamed batch."""

    async def generate_request(self, obj, request=None):
        self.sent.append(obj.rid)
        rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid
        for step in range(2):
            for at, rid in enumerate(rids):
                meta = {"id": rid, "finish_reason": None}
                if at == 1 and step == 0:
                    self.between()
                if at == 1 and self.refuses:
                    if step == 0:
                        text = asleep_text({"kv_cache"}, "generate")
                        meta["finish_reason"] = {"type": "abort", "message": text}
                        output = {"meta_info": meta, "index": at}
                        own = sleeping_manager.own_abort_reason
                        yield await admissions.abort_reason(own, self, output, obj.stream)
                    continue
                yield {"text": f"{rid}{step}", "index": at, "meta_info": meta}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("when", ["wait", "wake", "refuse"])
async def test_a_prompt_of_a_streamed_batch_that_is_refused_is_sent_again(policy, when, samples):
    """The batch's other prompts have had outputs, so it cannot be sent again as a whole."""
    policy(when)
    manager = Streams()
    manager.refuses = False
    await change(manager, "release")
    await change(manager, "resume")

    def between():
        manager.refuses, manager.tags = True, {"kv_cache"}
        manager.between = lambda: None
        if when == "wait":
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: loop.create_task(change(manager, "resume")))

    manager.between = between
    obj = Part(["a", "b", "c"], True, is_single=False)
    obj.parallel_sample_num = samples
    found = [o async for o in admissions.generate(Streams.generate_request, manager, obj)]
    texts = [(one["index"], one.get("text")) for one in found]
    others = [(0, "a0"), (2, "c0"), (0, "a1"), (2, "c1")]
    if when == "refuse" or samples > 1:  # the prompt's output says why
        assert texts == [others[0], (1, None), *others[1:]]
        assert "kv_cache" in found[1]["meta_info"]["finish_reason"]["message"]
        assert manager.sent == [["a", "b", "c"]]
    else:
        assert texts == [*others, (1, "b0"), (1, "b1")]
        assert manager.sent == [["a", "b", "c"], "b"]


async def test_names_that_were_not_sent_are_forgotten(policy):
    """Samples have other names than their prompts."""
    policy("wake")
    manager = Batches()
    manager.tags = {"kv_cache"}
    obj = GenerateReqInput(["a", "b"], is_single=False)
    obj.parallel_sample_num = 2
    assert [
        output async for output in admissions.generate(Batches.generate_request, manager, obj)
    ] and not manager.rid_to_state
    assert manager.aborted == []


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
    """Also if the memory is resumed before the request looks whether it was aborted."""
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
    """SGLang 0.5.12 would wait forever for the answer in each later query."""
    monkeypatch.setattr(admission, "QUERY_SECONDS", 0.01)
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


async def test_weights_are_read_after_a_wake_up_from_the_engines_own_release(policy, monkeypatch):
    """The scheduler's reply to a refused read is None, without a reason."""
    policy("wake")
    monkeypatch.setenv("MEMSAVER_SGLANG_SLEEP_AFTER", "5")
    manager = Manager()
    manager.tags = {"weights"}

    async def get_weights_by_name(manager, obj):
        return None if manager.tags else [0.5]

    hook = admissions.call("read its weights")
    assert await hook(get_weights_by_name, manager, "a.weight") == [0.5]


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


async def test_weights_without_a_backup_are_not_woken_for_a_generation(policy):
    policy("wake")
    manager = await asleep(enable_weights_cpu_backup=False)
    with pytest.raises(EngineAsleepError, match="weights has no backup"):
        await outputs(manager, GenerateReqInput("a"))
    assert (await update(manager))[0] is True


async def test_weights_that_were_to_be_rewritten_are_not_woken_for_a_generation(policy):
    policy("wake")
    manager = Manager()
    await change(manager, "release", rid=REWRITTEN)
    await change(manager, "release")  # of a sleeping engine
    with pytest.raises(EngineAsleepError, match="weights has no backup"):
        await outputs(manager, GenerateReqInput("a"))
    await change(manager, "resume")
    await change(manager, "release")
    assert await outputs(manager, GenerateReqInput("a"))


@pytest.mark.parametrize("when", ["wait", "wake"])
async def test_a_health_check_neither_waits_nor_wakes_the_engine(policy, when):
    policy(when)
    manager = await asleep()
    with pytest.raises(EngineAsleepError):
        await outputs(manager, GenerateReqInput("HEALTH_CHECK_1"))
    assert manager.tags == set(BOTH)


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
