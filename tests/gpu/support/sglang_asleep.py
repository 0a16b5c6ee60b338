"""Scenarios in which a sleeping engine receives requests and refuses them, holds them, or wakes up.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from expected_errors import raises
from gpu_trainer import Trainer
from sglang_checks import ROOM, check_output, sleep
from sglang_engines import PROMPTS, Session, greedy, request
from sglang_updates import update_from_disk

from memsaver.errors import OutOfDeviceMemoryError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.policies import Policy
from memsaver.integrations.engine.status import Status
from memsaver.integrations.sglang.admissions import admission_of

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
MOST_SECONDS = 30


def engine_requests(session: Session) -> dict[str, Callable[[], Any]]:
    """Return calls to the engine that require released memory, keyed by description."""
    engine, options = session.engine, {"sampling_params": greedy(4)}
    name, tensor = next(iter(session.weights[0].items()))
    calls = {
        "generation": lambda: engine.generate(input_ids=PROMPTS[0], **options),
        "batch": lambda: engine.generate(input_ids=list(PROMPTS), **options),
        "stream": lambda: list(engine.generate(input_ids=PROMPTS[0], stream=True, **options)),
        "update": lambda: engine.update_weights_from_tensor([(name, tensor.clone())]),
        "disk": lambda: engine.update_weights_from_disk(str(session.log.parent / "model")),
        "adapter": lambda: engine.load_lora_adapter("adapter", "/nowhere"),
        "parameter": lambda: engine.get_weights_by_name("model.norm.weight"),
    }
    if len(session.replicas) > 1:  # SGLang does not send tensors to replicas
        del calls["update"], calls["adapter"]
    return calls


def requests_are_refused(session: Session) -> None:
    """Each request that requires released memory raises a typed error; a flush succeeds."""
    for tags in (["weights"], None):
        sleep(session, tags)
        released = session.controller.released
        for what, call in engine_requests(session).items():
            with raises(EngineAsleepError) as caught:
                call()
            assert set(caught[0].tags) == released, (what, caught[0].tags)
        with raises(EngineAsleepError):
            session.controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
        assert session.flush()
        assert session.controller.refresh() is not Status.AWAKE
        session.controller.wake_up()
        check_output(session)
        session.settle()


def the_scheduler_refuses_too(session: Session) -> None:
    """The scheduler refuses a request that a release has overtaken on the way to the scheduler."""
    admission = admission_of(session.engine.tokenizer_manager)
    assert admission is not None
    for tags in (["kv_cache"], ["weights"], ["cuda_graph"], None):
        sleep(session, tags)
        for what, call in engine_requests(session).items():
            if what in ("parameter", "adapter") or (tags and what in ("update", "disk")):
                continue  # the first has no text in its reply; adapters are not enabled
            admission.learn(())  # as if this process did not know of the release
            if what == "stream":  # in SGLang's own format, as the stream may have begun
                (output,) = call()
                reason = output["meta_info"]["finish_reason"]
                assert reason["status_code"] == 503 and "asleep" in reason["message"], reason
                continue
            with raises(EngineAsleepError) as caught:
                call()
            assert set(caught[0].tags) == session.controller.released, (what, caught[0])
        session.controller.wake_up()
        check_output(session)
        session.settle()


def http_requests_are_refused(session: Session) -> None:
    """The server answers with status 503 and the released tags, and still reports its health."""
    url, prompt = session.url, {"input_ids": PROMPTS[0], "sampling_params": greedy(4)}
    session.settle()
    assert request(url, "/health")[0] == 200
    session.settle()
    paths = {
        "/generate": prompt,
        "/generate?stream": {**prompt, "stream": True},
        "/update_weights_from_disk": {"model_path": str(session.log.parent / "model")},
        "/load_lora_adapter": {"lora_name": "adapter", "lora_path": "/nowhere"},
        "/get_weights_by_name": {"name": "model.norm.weight"},
        "/v1/completions": {"model": "model", "prompt": PROMPTS[0], "max_tokens": 4},
    }
    for tags in (["weights"], ["kv_cache", "weights", "cuda_graph"]):
        status, text = request(url, RELEASE, {"tags": tags})
        assert status == 200, text
        for path, payload in paths.items():
            status, text = request(url, path.partition("?")[0], payload)
            assert status == 503, (path, status, text)
            error = json.loads(text)["error"]
            assert set(error["tags"]) == set(tags) and error["type"] == "engine_asleep", error
        for path in ("/health", "/health_generate"):
            status, text = request(url, path)
            found = json.loads(text)
            assert status == 503 and found["status"] == "asleep", (status, text)
            assert set(found["tags"]) == set(tags), found
        assert request(url, "/flush_cache", {})[0] == 200
        status, text = request(url, RESUME, {})
        assert status == 200, text
        assert session.controller.refresh() is Status.AWAKE
        check_output(session)
        session.settle()
    assert request(url, "/health_generate")[0] == 200


class DrainReqInput:
    """A request type that no known version of SGLang defines."""


def unknown_requests_are_refused(session: Session) -> None:
    """A request of an unknown type is refused, even by an engine that holds known requests."""
    manager = session.engine.tokenizer_manager
    sleep(session, ["weights"])
    with raises(EngineAsleepError) as caught:
        session.run(lambda: manager.slow_down_communicator(DrainReqInput()))
    assert "DrainReqInput" in str(caught[0]) and caught[0].tags == ("weights",), caught[0]
    session.controller.wake_up()
    session.settle()
    check_output(session)


def requests_wake(session: Session) -> None:
    """A request wakes the engine and returns the same output as before; an update wakes the
    weights.
    """
    controller = session.controller
    for _ in range(2):
        sleep(session)
        check_output(session)
        session.settle()
        assert controller.refresh() is Status.AWAKE
    sleep(session)
    if session.url or session.sends_no_tensors:
        done, message = update_from_disk(session, session.log.parent / "model")
    else:
        name, tensor = next(iter(session.weights[0].items()))
        done, message = session.engine.update_weights_from_tensor([(name, tensor.clone())])
    assert done, message
    assert controller.refresh() is Status.WEIGHTS_ONLY
    check_output(session)


def incomplete_weights_are_not_read(session: Session) -> None:
    """A request does not wake the rest of the engine before discarded weights are loaded again."""
    controller = session.controller
    controller.sleep(keep_weights=False)
    controller.wake_up("weights", keep_weights=False)
    with raises(EngineAsleepError) as caught:
        controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    assert "kv_cache" in caught[0].tags and "weights" not in caught[0].tags, caught[0].tags
    assert controller.refresh() is Status.WEIGHTS_ONLY
    done, message = update_from_disk(session, session.log.parent / "model")
    assert done, message
    check_output(session)


def a_wake_without_memory(session: Session) -> None:
    """If a trainer occupies the memory, the request raises an error and the engine stays asleep."""
    sleep(session)
    trainer = Trainer(session.gpus - 1, ROOM, pattern=5)
    with raises(EngineAsleepError) as caught:
        session.controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    assert "out of memory" in str(caught[0]), str(caught[0])
    if session.engine is not None:
        assert isinstance(caught[0].__cause__, OutOfDeviceMemoryError), caught[0].__cause__
    assert session.controller.refresh() is Status.ASLEEP and trainer.is_intact()
    trainer.free()
    check_output(session)


def an_idle_engine_sleeps(session: Session) -> None:
    """After a period without requests, the engine releases its memory; a later request wakes the
    engine.
    """
    session.settle()  # with data-parallel attention, cached prefixes change the output
    check_output(session)
    session.wait_until_asleep()
    if session.url:
        status, text = request(session.url, "/health")
        assert (status, json.loads(text)["status"]) == (200, "asleep"), (status, text)
    check_output(session)


def embeddings_while_asleep(session: Session) -> None:
    """Depending on the policy, an embedding request is refused, is held, or wakes the sleeping
    engine.
    """

    def is_right() -> bool:
        return session.embedding(PROMPTS[2]) == session.expected[2]

    under_each_policy(session, is_right, None, Status.AWAKE)


def adapters_while_asleep(session: Session) -> None:
    """A request to load a LoRA adapter is refused, is held, or wakes the weights; the adapter then
    works.
    """
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    import sglang_kind_models

    folder, names = session.log.parent / "adapter", list[str]()
    sglang_kind_models.save_adapter(session.log.parent / "model", folder, seed=1)

    def is_loaded() -> bool:
        name = f"adapter{len(names)}"
        load = session.engine.async_load_lora_adapter
        reply = session.run(lambda: load(name, str(folder)))
        names.append(name)
        return bool(reply.success)

    under_each_policy(session, is_loaded, "weights", Status.WEIGHTS_ONLY)
    found = []
    for name in names:
        session.settle()
        found.append(session.outputs(lora_path=name))
    assert len(found) == 2 and found[0] == found[1], found
    assert all(one != plain for one, plain in zip(found[0], session.expected, strict=True))
    session.settle()
    check_output(session)


def under_each_policy(
    session: Session, is_right: Callable[[], bool], needs: str | None, woken: Status
) -> None:
    """Send a request to the sleeping engine under each policy.

    Args:
        session: a session with an `sglang.Engine`, whose policy is replaced.
        is_right: a function that sends the request and returns whether the answer is correct.
        needs: the tag that the request requires; None for all tags.
        woken: the engine's status after the request has woken it.
    """
    admission = admission_of(session.engine.tokenizer_manager)
    assert admission is not None
    sleep(session)
    admission.policy = Policy("refuse")
    with raises(EngineAsleepError) as caught:
        is_right()
    assert set(caught[0].tags) == session.controller.released, caught[0].tags

    admission.policy = Policy("wait", MOST_SECONDS)
    with ThreadPoolExecutor(1) as client:
        held = client.submit(is_right)
        time.sleep(2)
        assert not held.done() and admission.waiting == 1
        session.controller.wake_up(needs)
        assert held.result(MOST_SECONDS)
    sleep(session)
    admission.policy = Policy("wake", MOST_SECONDS)
    assert is_right()
    assert session.controller.refresh() is woken
    session.controller.wake_up()
    session.settle()
    check_output(session)


def two_models_take_turns(session: Session) -> None:
    """Two servers that do not fit on the GPU together can answer requests without explicit sleep
    calls.
    """
    other = session.other
    assert other is not None and other.expected != session.expected
    servers = (session, other)

    def is_right(server: Session) -> bool:
        server.settle()  # a cached prefix changes the arithmetic
        return server.outputs() == server.expected

    assert all([is_right(server) for _ in range(3) for server in servers])
    with ThreadPoolExecutor(2) as clients:  # both at once
        assert all(clients.map(is_right, servers))
    needs = []
    for server in servers:
        assert is_right(server)
        before = session.free()[0]  # the other server has released its memory
        server.wait_until_asleep()
        needs.append(session.free()[0] - before)
    assert sum(needs) > session.free()[0], (needs, session.free())


def wakes_and_releases_at_once(session: Session) -> None:
    """Clients that generate tokens and clients that release memory do not interfere with one
    another.
    """
    prompt = {"input_ids": PROMPTS[1], "sampling_params": greedy(8)}
    expected = session.expected[1][:8]
    end = time.monotonic() + 8
    answers: list[tuple[int, str]] = []
    releases: list[int] = []

    def generate() -> None:
        while time.monotonic() < end:
            answers.append(request(session.url, "/generate", prompt))

    def release() -> None:
        while time.monotonic() < end:
            releases.append(request(session.url, RELEASE, {})[0])
            time.sleep(0.01)

    threads = [threading.Thread(target=work) for work in (generate, generate, release, release)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MOST_SECONDS + 30)
    assert {status for status, _ in answers} == {200}, [a for a in answers if a[0] != 200][:1]
    assert all(json.loads(text)["output_ids"] == expected for _, text in answers)
    assert set(releases) <= {200, 400} and 200 in releases, set(releases)
    check_output(session)
