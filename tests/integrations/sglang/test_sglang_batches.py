"""Tests batches of requests to a sleeping engine in the tokenizer manager, with a fake manager."""

from __future__ import annotations

import asyncio

import pytest
import sleeping_manager
from sleeping_manager import GenerateReqInput, Manager, change

from memsaver.integrations.engine import admission
from memsaver.integrations.engine.refusals import asleep_text
from memsaver.integrations.sglang import admissions

pytestmark = pytest.mark.usefixtures("manager_modules")


class Batches(Manager):
    """A manager with two schedulers, one of which sleeps and refuses a part of the first batch.

    Args:
        aborts: whether the manager aborts the parts of a failed request, as SGLang 0.5.23 does.
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
    """The client aborts the batch after the refusal, before the schedulers have ended its
    accepted parts.
    """
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
    """A batch whose prompts can be sent separately, as in SGLang."""

    def __getitem__(self, at):
        return Part(self.rid[at], self.stream)


class Streams(Manager):
    """A manager whose second scheduler is released after a streamed batch's first output."""

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
    """The batch's other prompts already have outputs, so the whole batch cannot be sent again."""
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
