"""Scenarios for requests to a sleeping vLLM engine.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import vllm_adapters
from expected_errors import raises
from gpu_trainer import GIB, Trainer
from vllm_cycles import check_output
from vllm_engines import KV_CACHE, Session

from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineAsleepError

SLEEPS_WITHIN = 20  # seconds, of an idle engine


def refused(call: Callable[[], Any], *tags: str) -> EngineAsleepError:
    """Check that a call is refused because these tags are released; return the error."""
    try:
        call()
    except EngineAsleepError as error:
        assert sorted(error.tags) == sorted(tags), error
        return error
    raise AssertionError("a request to a sleeping engine was not refused")


def requests_are_refused(session: Session) -> None:
    """Requests that require released memory are refused; the engine stays asleep and still
    works.
    """
    session.llm.sleep(level=1)
    refused(session.outputs, "kv_cache", "weights")
    refused(lambda: session.in_workers("reload_weights"), "kv_cache", "weights")
    if session.group == "adapters":
        adapter = vllm_adapters.save(session.folder / "refused", seed=9)
        refused(lambda: session.llm.llm_engine.add_lora(adapter), "kv_cache", "weights")
    session.llm.wake_up(tags=["weights"])
    refused(session.outputs, "kv_cache")
    session.llm.wake_up(tags=["kv_cache"])
    check_output(session)


def direct_calls(session: Session) -> None:
    """Calls of the workers' own `sleep` and `wake_up` follow the same rules as the engine's."""
    for level in (0, 3):
        with raises(ConfigError) as caught:
            session.in_workers("sleep", level)
        assert f"level {level}" in str(caught[0]), caught[0]
        check_output(session)
    for level in (1, 2):  # a later call keeps what the first one saved
        session.in_workers("sleep", level)
        refused(session.outputs, "kv_cache", "weights")
        assert not any(sum(held.values()) for held in session.in_workers("check_tags"))
    for tags in ("weights", "kv_cache"):  # a string, as vLLM's own allocator accepts it
        session.in_workers("wake_up", tags)
    check_output(session)
    session.in_workers("sleep", 2)
    session.in_workers("wake_up", ["weights"])
    refused(session.outputs, "kv_cache")
    session.in_workers("reload_weights")
    session.in_workers("wake_up", None)
    check_output(session)


def requests_wake(session: Session) -> None:
    """A generation wakes the engine, whose output is unchanged."""
    for _ in range(2):
        session.llm.sleep(level=1)
        check_output(session)
        assert not session.is_asleep()
    session.llm.sleep(level=1)
    session.llm.wake_up(tags=["weights"])
    check_output(session)


def requests_never_wake_lost_weights(session: Session) -> None:
    """After level 2, a generation is refused until the weights are loaded."""
    check_output(session)  # an idle engine may have fallen asleep at level 1
    session.llm.sleep(level=2)
    refused(session.outputs, "kv_cache", "weights")
    session.llm.wake_up(tags=["weights"])
    refused(session.outputs, "kv_cache")
    session.in_workers("reload_weights")
    check_output(session)  # wakes the KV cache


def requests_that_cannot_wake(session: Session) -> None:
    """Without free memory, a request is refused with the reason, and the engine stays asleep."""
    session.llm.sleep(level=1)
    trainer = Trainer(0, GIB, pattern=3)
    try:
        error = refused(session.outputs, "kv_cache", "weights")
        assert "out of memory" in f"{error} {error.__cause__}", (error, error.__cause__)
        assert not any(sum(held.values()) for held in session.in_workers("check_tags"))
        assert trainer.is_intact()
    finally:
        trainer.free()
    check_output(session)


def an_idle_engine_sleeps(session: Session) -> None:
    """An engine without requests releases its memory, and the next request wakes it."""
    check_output(session)
    awake = session.free()[0]
    end = time.monotonic() + SLEEPS_WITHIN
    while session.free()[0] < awake + KV_CACHE:  # a call of the engine would count as a request
        assert time.monotonic() < end, "the idle engine keeps its memory"
        time.sleep(0.2)
    assert not any(sum(held.values()) for held in session.in_workers("check_tags"))
    check_output(session)
