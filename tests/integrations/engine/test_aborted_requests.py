"""Tests requests that are aborted while they wait for an engine, and requests that the engine
refuses."""

import asyncio
import contextlib

import pytest

from memsaver.integrations.engine import admission, admitted
from memsaver.integrations.engine.admission import (
    EVERYTHING,
    Admission,
    ClientGoneError,
    RequestAbortedError,
)
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.policies import Policy
from memsaver.integrations.engine.refusals import asleep_in, asleep_text


class Awake:
    """A fake engine whose memory is mapped."""

    tags: frozenset[str] = frozenset()

    async def released(self):
        return self.tags

    async def resume(self, tags):
        return frozenset()


def made(engine=None, seconds=5.0) -> Admission:
    engine = engine or Awake()
    found = Admission(Policy("wake", seconds), engine)
    found.learn(engine.tags)
    return found


class Refused:
    """A generation that the engine's processes refuse."""

    ids = ("a",)

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.reaches = lambda place: None

    async def is_gone(self):
        return False

    async def send(self):
        assert not self.sent.is_set(), "it was sent again"
        self.sent.set()
        self.reaches("sent")
        try:
            raise asleep_in(asleep_text(EVERYTHING, "generate"))
            yield
        finally:
            await asyncio.sleep(0)
            self.reaches("refused")

    async def take_back(self, deadline):
        self.reaches("taken back")
        asyncio.get_running_loop().call_soon(self.reaches, "repeated")


@pytest.mark.parametrize("place", ["sent", "refused", "taken back", "repeated"])
async def test_a_refused_request_can_be_aborted_before_it_is_sent_again(place):
    found, request, reached = made(), Refused(), []

    def reaches(current):
        reached.append(current)
        if current == place:
            found.abort(["a"])

    request.reaches = reaches
    with pytest.raises(RequestAbortedError):
        await anext(admitted.generation(found, "generate", request))
    assert place in reached
    found.abort(["a"])


class Batch(Refused):
    """A streamed batch. The engine refuses its prompts "b" and "c" after the first output."""

    ids = ("a", "b", "c")

    def __init__(self, parts: tuple[str, ...] = ("b", "c")) -> None:
        super().__init__()
        self.parts = {name: Batch(()) for name in parts}
        for name, part in self.parts.items():
            part.ids = (name,)

    async def send(self):
        self.sent.set()
        for output in ("first", *self.parts, "last"):
            self.reaches(output)
            yield output

    def refusal_in(self, output):
        return None

    def refused_part(self, output):
        return self.parts.get(output)


@pytest.mark.parametrize(
    ("aborted", "after", "sent"),
    [("b", 2, []), ("c", 2, ["b"]), ("c", 3, ["b"]), ("d", 2, ["b", "c"])],
)
async def test_a_refused_part_of_a_batch_can_be_aborted_before_it_is_sent_again(
    aborted, after, sent
):
    found, request, outputs = made(), Batch(), []
    ends = contextlib.nullcontext() if aborted == "d" else pytest.raises(RequestAbortedError)
    with ends:
        async for output in admitted.generation(found, "generate", request):
            outputs.append(output)
            if len(outputs) == after:
                found.abort([aborted])
    assert [name for name, part in request.parts.items() if part.sent.is_set()] == sent
    assert outputs == ["first", "last"] * (1 + len(sent))
    found.abort([], every=True)


@pytest.mark.parametrize(("place", "sent"), [("first", []), ("b", []), ("c", ["b"])])
async def test_a_part_that_is_aborted_before_its_refusal_arrives_is_not_sent_again(place, sent):
    found, request = made(), Batch()
    aborted = "b" if place == "first" else place
    request.reaches = lambda current: found.abort([aborted] if current == place else [])
    with pytest.raises(RequestAbortedError):
        async for _ in admitted.generation(found, "generate", request):
            pass
    assert [name for name, part in request.parts.items() if part.sent.is_set()] == sent


class Hanging(Awake):
    """A sleeping engine that does not answer a wake-up."""

    tags = EVERYTHING

    async def resume(self, tags):
        await asyncio.Event().wait()


@pytest.mark.parametrize("ends", ["abort", "disconnect", "timeout"])
async def test_a_request_does_not_wait_without_end_for_a_wake_up_without_an_answer(
    monkeypatch, ends
):
    monkeypatch.setattr(admission, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(admission, "_WAKE_SECONDS", 0.05 if ends == "timeout" else 60.0)
    found, request = made(Hanging(), seconds=0.05), Refused()

    async def is_gone():
        return ends == "disconnect"

    request.is_gone = is_gone
    if ends == "timeout":  # `generation` would raise a framework's error
        work = found.admit(EVERYTHING, "generate")
    else:
        work = anext(admitted.generation(found, "generate", request))
    answer = asyncio.ensure_future(work)
    await asyncio.sleep(0.02)
    if ends == "abort":
        found.abort(["a"])
    errors = {
        "abort": (RequestAbortedError, "aborted"),
        "disconnect": (ClientGoneError, "disconnected"),
        "timeout": (EngineAsleepError, r"did not answer the wake-up within 0\.0\d+ s"),
    }
    kind, text = errors[ends]
    with pytest.raises(kind, match=text):
        await asyncio.wait_for(answer, 5)
    assert not request.sent.is_set()
