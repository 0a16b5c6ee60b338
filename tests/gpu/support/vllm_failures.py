"""Scenarios with memory shortages, requests during a sleep, and killed workers on a vLLM engine.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import vllm_engines
from gpu_trainer import GIB, MIB, Trainer
from vllm_cycles import check_output
from vllm_engines import PROMPTS, SLACK, Session, greedy

from memsaver.integrations.engine.errors import EngineDiedError

ROOM = 2 * GIB  # for the weights, and not for the KV cache
LONG = 400  # tokens of a request that is in progress when the engine sleeps
END_SECONDS = 30


def a_wake_without_memory(session: Session) -> None:
    """A wake-up without free memory fails and reports the cause; the engine can wake up later."""
    session.llm.sleep(level=1)
    trainer = Trainer(0, ROOM - GIB, pattern=1)
    try:
        assert session.free()[0] < vllm_engines.KV_CACHE
        refused(session, None)
        session.llm.wake_up(tags=["weights"])
        refused(session, ["kv_cache"])
        assert trainer.is_intact()
    finally:
        trainer.free()
    session.llm.wake_up(tags=["kv_cache"])
    assert not session.is_asleep()
    check_output(session)


def refused(session: Session, tags: list[str] | None) -> None:
    """Check that a wake-up fails with its cause and allocates no memory."""
    before, held = session.free(), session.in_workers("check_tags")
    try:
        session.llm.wake_up(tags=tags)
    except Exception as error:
        for part in ("kv_cache", "out of memory", "released as before"):
            assert part in str(error), str(error)
    else:
        raise AssertionError("the engine woke up without memory")
    assert session.is_asleep() and session.in_workers("check_tags") == held
    taken = [then - now for now, then in zip(session.free(), before, strict=True)]
    assert max(taken) <= SLACK, taken


def requests_are_aborted(session: Session) -> None:
    """A sleep in the mode "abort" ends the requests in progress; the engine works afterwards."""
    add_requests(session)
    session.llm.sleep(level=1, mode="abort")
    session.llm.wake_up()
    ended = drain(session)
    assert [one.outputs[0].finish_reason for one in ended] == ["abort"] * 2, ended
    check_output(session)


def requests_end_first(session: Session) -> None:
    """A sleep in the mode "wait" begins after the requests in progress have ended."""
    add_requests(session)
    session.llm.sleep(level=1, mode="wait")
    assert not any(sum(held.values()) for held in session.in_workers("check_tags"))
    assert [len(one.outputs[0].token_ids) for one in drain(session)] == [LONG] * 2
    session.llm.wake_up()
    check_output(session)


def requests_continue(session: Session) -> None:
    """After a sleep in the mode "keep", the requests in progress continue to their end."""
    add_requests(session)
    session.llm.sleep(level=1, mode="keep")
    assert not any(sum(held.values()) for held in session.in_workers("check_tags"))
    session.llm.wake_up()
    ended = drain(session)
    assert [len(one.outputs[0].token_ids) for one in ended] == [LONG] * 2
    check_output(session)


def add_requests(session: Session) -> None:
    """Add two requests and wait until the engine processes them."""
    for number, prompt in enumerate(PROMPTS[:2]):
        inputs: Any = {"prompt_token_ids": prompt}
        session.llm.llm_engine.add_request(f"long-{number}", inputs, greedy(LONG))
    for _ in range(3):
        session.llm.llm_engine.step()


def drain(session: Session) -> list[Any]:
    """Return the outputs of the requests in their order, after all requests have ended."""
    ended: dict[str, Any] = {}
    while session.llm.llm_engine.has_unfinished_requests():
        for one in session.llm.llm_engine.step():
            if one.finished:
                ended[one.request_id] = one
    return [ended[name] for name in sorted(ended)]


def out_of_memory_in_the_pool(session: Session) -> None:
    """Failed allocations leave no error state: later allocations succeed and the engine works."""
    session.in_workers("check_out_of_memory")
    check_output(session)
    session.llm.sleep(level=1)
    session.llm.wake_up()
    check_output(session)


def exceptions_in_the_pool(session: Session) -> None:
    """An exception within a pool's block ends the block."""
    session.in_workers("check_exception_in_the_pool")
    session.llm.sleep(level=1)
    session.llm.wake_up()
    check_output(session)


def freed_while_asleep(session: Session) -> None:
    """Memory freed during a sleep is not mapped again; all other contents are restored."""
    for tag in ("kv_cache", "weights"):
        before = session.free()
        session.in_workers("check_hold", tag, 256 * MIB)
        session.llm.sleep(level=1)
        session.in_workers("check_drop")
        session.llm.wake_up()
        check_output(session)
        left = [then - now for now, then in zip(session.free(), before, strict=True)]
        assert max(left) <= SLACK, (tag, left)


def later_allocations_are_saved(session: Session) -> None:
    """A tensor added to the weights after the start keeps its contents."""
    session.in_workers("check_hold", "weights", 64 * MIB)
    expected = session.in_workers("check_sum")
    for _ in range(2):
        session.llm.sleep(level=1)
        session.llm.wake_up()
        assert session.in_workers("check_sum") == expected
    session.in_workers("check_drop")
    check_output(session)


def a_second_engine(session: Session) -> None:
    """A second engine in the same process is refused as in vLLM; the first engine still works."""
    from vllm import LLM

    try:
        LLM(**vllm_engines.arguments_of(session.group, session.folder))
    except Exception as error:
        assert "one instance per process" in str(error), error
    else:
        raise AssertionError("a second engine was started")
    check_output(session)
    session.llm.sleep(level=1)
    session.llm.wake_up()
    check_output(session)


def a_killed_worker(session: Session) -> None:
    """Workers that are killed during a sleep leave no GPU memory allocated.

    This scenario terminates the engine. Later calls raise errors within a bounded time, and
    eventually the error for a dead engine.
    """
    pids = session.in_workers("check_pid")
    assert os.getpid() not in pids
    session.llm.sleep(level=1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + END_SECONDS
    while not is_death(error := raised_by(session.llm.wake_up)):
        assert time.monotonic() < end, repr(error)
        time.sleep(0.2)
    while (
        min(now - then for now, then in zip(session.free(), session.before, strict=True)) < -SLACK
    ):
        assert time.monotonic() < end, (session.free(), session.before)
        time.sleep(0.2)


def is_death(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError | EngineDiedError)


def raised_by(call: Callable[[], Any]) -> BaseException:
    """Return the error that a call raises; fail if the call returns or does not end in time."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(END_SECONDS)
    assert found, f"a call to a dead engine did not end in {END_SECONDS} s"
    assert found[0] is not None, "a call to a dead engine returned"
    return found[0]
