"""Scenarios in which a sleeping engine holds requests until it wakes up.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from expected_errors import raises
from sglang_asleep import MOST_SECONDS
from sglang_checks import check_output, sleep
from sglang_engines import PROMPTS, TOGETHER, Session, greedy, request

from memsaver.integrations.engine.admission import RequestAbortedError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.sglang.admissions import admission_of

CLIENTS = 6


def requests_wait(session: Session) -> None:
    """The engine holds requests until it wakes up, and then answers them."""
    controller = session.controller
    sleep(session)
    results: list[Any] = []

    def generate() -> None:
        results.append(session.outputs())

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    time.sleep(1)
    assert not results and thread.is_alive()
    controller.wake_up("weights")
    time.sleep(0.5)
    assert not results
    controller.wake_up()
    thread.join(MOST_SECONDS)
    assert results == [session.expected], results
    session.settle()
    sleep(session)
    with raises(EngineAsleepError) as caught:
        controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    assert "no caller woke it up" in str(caught[0]), str(caught[0])
    if session.url:
        status, text = request(session.url, "/health")
        assert (status, json.loads(text)["status"]) == (200, "asleep"), (status, text)
        check_disconnection(session)
    controller.wake_up()
    check_output(session)


def held_requests_keep_their_order(session: Session) -> None:
    """Concurrent held requests are answered in the order of their arrival."""
    sleep(session)
    ended = session.engine.loop.run_until_complete(_held_requests(session.engine))
    turns = [number // TOGETHER for number in ended]
    assert len(ended) == CLIENTS and turns == sorted(turns), ended
    assert session.controller.refresh() is Status.AWAKE
    session.settle()
    check_output(session)


async def _held_requests(engine: Any) -> list[int]:
    """Wake an engine that holds requests; return the requests' numbers in the order of the
    answers.
    """
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    admission = admission_of(engine.tokenizer_manager)
    assert admission is not None
    ended: list[int] = []

    async def generate(number: int) -> None:
        await engine.async_generate(input_ids=[number + 3] * 4, sampling_params=greedy(100))
        ended.append(number)

    clients = [asyncio.ensure_future(generate(number)) for number in range(CLIENTS)]
    await until_held(admission, clients)  # the loop starts the clients in order
    await engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)
    await asyncio.wait_for(asyncio.gather(*clients), MOST_SECONDS)
    return ended


async def until_held(admission: Any, clients: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until the engine holds the requests of all clients; raise a client's error, if any."""
    deadline = time.monotonic() + MOST_SECONDS
    while admission.waiting < len(clients):
        for one in clients:
            if one.done():
                one.result()
        assert time.monotonic() < deadline, admission.waiting
        await asyncio.sleep(0.01)


def held_requests_are_aborted(session: Session) -> None:
    """An abort ends the named held request; the other request is answered after the wake-up."""
    manager = session.engine.tokenizer_manager
    admission = admission_of(manager)
    assert admission is not None
    sleep(session)

    async def requests() -> Any:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        options = {"input_ids": PROMPTS[1], "sampling_params": greedy(8)}
        clients = [
            asyncio.ensure_future(session.engine.async_generate(rid=name, **options))
            for name in ("first", "second")
        ]
        await until_held(admission, clients)
        manager.abort_request(rid="first")
        ended, _ = await asyncio.wait(clients, timeout=4, return_when=asyncio.FIRST_COMPLETED)
        assert ended == {clients[0]} and admission.waiting == 1, (ended, admission.waiting)
        await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)
        return clients[0].exception(), await clients[1]

    error, output = session.run(requests)
    assert isinstance(error, RequestAbortedError), error
    assert output["output_ids"] == session.expected[1][:8], output
    assert session.controller.refresh() is Status.AWAKE
    session.settle()
    check_output(session)


def check_disconnection(session: Session) -> None:
    """Check that the server drops the held request of a client that disconnects."""
    prompt = {"input_ids": PROMPTS[0], "sampling_params": greedy(4)}
    before = session.log.stat().st_size
    assert request(session.url, "/generate", prompt, seconds=1)[0] == 0  # disconnects
    deadline = time.monotonic() + 4  # the server checks every second, and refuses after 6
    while "disconnect" not in (said := session.log.read_bytes()[before:].decode(errors="replace")):
        assert time.monotonic() < deadline, f"the disconnection was not noticed: {said}"
        time.sleep(0.1)
    assert session.controller.refresh() is Status.ASLEEP
