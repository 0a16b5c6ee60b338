"""Scenarios with calls and requests at inconvenient times, with and without the controller.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from expected_errors import raises
from gpu_trainer import GIB, MIB, Trainer
from sglang_checks import EVERY, ROOM, check_output, sleep
from sglang_engines import PROMPTS, Session, greedy, request

from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineBusyError
from memsaver.integrations.engine.status import Status

LONG = 3000  # tokens; generating them takes seconds
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def stream_of(session: Session) -> Iterator[Any]:
    """Start a request that bypasses the controller and runs for several seconds."""
    stream = session.engine.generate(
        input_ids=PROMPTS[0], sampling_params=greedy(LONG), stream=True
    )
    next(stream)
    return stream  # type: ignore[no-any-return]


def calls_past_the_controller(session: Session) -> None:
    """SGLang's own calls work for a trainer that does not use memsaver's controller."""
    engine, controller = session.engine, session.controller
    session.settle()
    before = session.free()
    engine.release_memory_occupation(tags=["kv_cache"])
    engine.release_memory_occupation(tags=["kv_cache"])  # again
    engine.release_memory_occupation(tags=["weights", "kv_cache"])  # one of them again
    assert controller.refresh() is Status.ASLEEP
    assert min(now - then for now, then in zip(session.free(), before, strict=True)) > GIB
    with raises(ConfigError) as caught:
        engine.release_memory_occupation(tags=["optimizer"])
    assert "optimizer" in str(caught[0])
    with raises(ConfigError):
        engine.resume_memory_occupation(tags=["optimizer"])
    engine.resume_memory_occupation(tags=["cuda_graph"])  # not released
    engine.resume_memory_occupation(tags=["weights"])
    assert controller.refresh() is Status.WEIGHTS_ONLY
    engine.resume_memory_occupation()  # the rest
    engine.resume_memory_occupation()  # nothing is left to resume
    assert controller.refresh() is Status.AWAKE
    check_output(session)


def a_release_under_a_request(session: Session) -> None:
    """A release is rejected while a request runs, and the request continues."""
    session.settle()
    stream = stream_of(session)
    with raises(EngineBusyError):
        session.engine.release_memory_occupation()
    with raises(EngineBusyError):
        session.controller.sleep()
    assert session.controller.refresh() is Status.AWAKE
    *_, last = stream
    assert len(last["output_ids"]) == LONG
    session.settle()
    check_output(session)


def a_sleep_that_aborts(session: Session) -> None:
    """A sleep with `abort=True` ends the running request early."""
    session.settle()
    stream = stream_of(session)
    report = session.controller.sleep(abort=True)
    assert set(report.changed) == EVERY and report.steps[0].name == "abort"
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort", last["meta_info"]
    assert len(last["output_ids"]) < LONG
    session.controller.wake_up()
    check_output(session)


def a_sleep_that_waits(session: Session) -> None:
    """A sleep with `wait_idle=True` waits until another thread's request has finished."""
    controller, results = session.controller, []

    def generate() -> None:
        options = {"input_ids": PROMPTS[0], "sampling_params": greedy(LONG)}
        results.append(controller.generate(**options))

    session.settle()
    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert not results, f"{LONG} tokens took no time"
    with raises(EngineBusyError):
        controller.sleep()
    report = controller.sleep(wait_idle=True)
    thread.join(10)
    assert len(results) == 1 and len(results[0]["output_ids"]) == LONG
    assert set(report.changed) == EVERY
    controller.wake_up()
    check_output(session)


def http_calls(session: Session) -> None:
    """SGLang's own endpoints accept repeated requests and reject unknown tags."""
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    url, controller = session.url, session.controller
    session.settle()
    for tags in (["kv_cache"], ["kv_cache"], ["weights", "kv_cache"]):
        status, text = request(url, release, {"tags": tags})
        assert status == 200, text
    assert controller.refresh() is Status.ASLEEP
    assert request(url, "/health")[0] == 503
    for path in (release, resume):
        status, text = request(url, path, {"tags": ["optimizer"]})
        assert status == 400 and "optimizer" in text, (status, text)
    for payload in ({"tags": ["cuda_graph"]}, {"tags": ["weights"]}, {}, {}):
        status, text = request(url, resume, payload)
        assert status == 200, text
    assert controller.refresh() is Status.AWAKE
    check_output(session)


def http_resume_that_does_not_fit(session: Session) -> None:
    """A resume without enough memory returns status 400 and the reason, and can be retried."""
    resume = "/resume_memory_occupation"
    sleep(session)
    trainer = Trainer(0, ROOM, pattern=9)
    before = session.free()
    status, text = request(session.url, resume, {})
    assert status == 400, (status, text)
    for part in ("resume of", "kv_cache", "out of memory", "free memory"):
        assert part in text, text
    # Another replica, whose GPU has room, resumes its memory.
    gpus = range(1 if len(session.replicas) > 1 else session.gpus)
    after = session.free()
    assert max(before[gpu] - after[gpu] for gpu in gpus) < 256 * MIB, (before, after)
    assert session.controller.refresh() is Status.ASLEEP
    trainer.free()
    status, text = request(session.url, resume, {})
    assert status == 200, text
    assert session.controller.refresh() is Status.AWAKE
    check_output(session)
