"""Tests SGLang's server with each framework's sequence of requests.

The requests are copied from the frameworks' sources. The other test files use the installed
frameworks.
"""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from types import SimpleNamespace

import pytest

import memsaver
from memsaver.integrations.engine.errors import EngineAsleepError, EngineTimeoutError
from memsaver.integrations.sglang import SleepController, Status

pytestmark = pytest.mark.recipes

# The requests of each framework, in order: the path, and the tags in the body; None for no tags.
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
SEQUENCES = {
    "verl": [(RELEASE, ["kv_cache", "weights"]), (RESUME, ["weights"]), (RESUME, ["kv_cache"])],
    "verl_adapters": [(RELEASE, ["kv_cache"]), (RESUME, ["kv_cache"])],
    "slime": [(RELEASE, None), (RESUME, ["weights"]), (RESUME, ["kv_cache", "cuda_graph"])],
    "xtuner": [(RELEASE, None), (RESUME, ["weights"]), (RESUME, ["kv_cache"])],
    "lightrft": [(RELEASE, ["kv_cache", "cuda_graph"]), (RESUME, ["kv_cache", "cuda_graph"])],
}


def post(engine, path, tags):
    body = {} if tags is None else {"tags": tags}
    request = urllib.request.Request(
        engine.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read() or b"null")


@pytest.mark.parametrize("framework", SEQUENCES)
def test_a_round_succeeds_after_calls_in_any_order(engine, sim, framework):
    """The calls imitate a step that raised an error or was interrupted between two calls."""
    scheduler, full, calls = engine.scheduler, sim.tag_bytes(), SEQUENCES[framework]
    orders = itertools.permutations(range(len(calls)))
    for start in sorted({order[:count] for order in orders for count in range(len(calls) + 1)}):
        for place in start:
            post(engine, *calls[place])
        for path, tags in calls:
            before = sim.tag_bytes()
            post(engine, path, tags)
            named = tags or ["weights", "kv_cache", "cuda_graph"]
            wanted = "paused" if path == RELEASE else "mapped"
            states = {name: memsaver.state(name) for name in ("weights", "kv_cache")}
            assert {states[name] for name in named if name in states} <= {wanted}
            if start == ():
                assert (sim.tag_bytes() < before) == (path == RELEASE)
        assert sim.tag_bytes() == full, start
        assert scheduler.weights.is_intact() and scheduler.kv_cache.is_zero(), start
        scheduler.kv_cache.fill(2)


def test_xtuner_resets_the_prefix_cache_by_releasing_once_more(engine):
    """SGLang's own handler would copy the model's buffers, which have no memory after a release."""
    post(engine, RELEASE, None)
    flushes = engine.scheduler.flushes
    post(engine, RELEASE, None)
    assert memsaver.state("kv_cache") == "paused" and engine.scheduler.flushes == flushes
    for tags in (["weights"], ["kv_cache"]):
        post(engine, RESUME, tags)
    assert engine.scheduler.weights.is_intact()


def test_a_controller_sees_a_frameworks_requests(engine):
    controller = SleepController(engine.url)
    assert controller.guarded and controller.status is Status.AWAKE
    post(engine, *SEQUENCES["xtuner"][0])
    assert controller.refresh() is Status.ASLEEP
    post(engine, RESUME, ["weights"])
    assert controller.refresh() is Status.WEIGHTS_ONLY
    controller.wake_up()
    assert controller.status is Status.AWAKE and controller.released == frozenset()


class DrainReqInput:
    """A request type that no known version of SGLang defines."""


def test_a_request_of_an_unknown_kind_is_refused_by_its_sender(engine):
    tokenizer = engine.tokenizer
    tokenizer.server_args = SimpleNamespace(enable_memory_saver=True)
    engine.run(tokenizer.get_internal_state())
    post(engine, RELEASE, ["weights"])
    with pytest.raises(EngineAsleepError, match="cannot process DrainReqInput") as caught:
        engine.run(tokenizer.slow_down_communicator(DrainReqInput()))
    assert caught.value.tags == ("weights",) and engine.scheduler.death is None
    post(engine, RESUME, ["weights"])


@pytest.mark.parametrize("slow", ["GetInternalStateReq", "ReleaseMemoryOccupationReqInput"])
def test_a_call_that_timed_out_can_be_repeated(engine, monkeypatch, slow):
    """SGLang 0.5.11 and 0.5.12 wait indefinitely in all calls that follow a cancelled call."""
    local = SimpleNamespace(loop=engine.loop, tokenizer_manager=engine.tokenizer, generate=None)
    control = SleepController(local)
    is_over, handle = threading.Event(), engine.scheduler._handle

    def answer(request):
        if type(request).__name__ == slow:
            is_over.wait(60)
        return handle(request)

    monkeypatch.setattr(engine.scheduler, "_handle", answer)
    with pytest.raises(EngineTimeoutError):
        control.sleep(timeout=0.5)
    is_over.set()
    for _ in range(2):
        control.sleep(timeout=60)
        assert control.refresh() == Status.ASLEEP
        control.wake_up(timeout=60)
