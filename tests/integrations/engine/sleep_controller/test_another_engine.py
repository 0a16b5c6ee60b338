"""Tests a controller of an engine that is neither SGLang nor vLLM; the tests set the engine's
answers.
"""

import itertools
import time
from dataclasses import replace

import pytest

from memsaver.integrations.engine.errors import (
    EngineBusyError,
    EngineTimeoutError,
)
from memsaver.integrations.engine.messages import Answer, SchedulerState
from memsaver.integrations.engine.sleep import EngineController
from memsaver.integrations.engine.status import Status


class AnotherEngine:
    """An `Engine` with two schedulers, whose memory is a set of tags."""

    def __init__(self) -> None:
        self.mapped, self.idle, self.number = {"kv_cache", "weights", "cuda_graph"}, True, 0

    def release(self, tags, timeout):
        self.mapped -= set(tags)
        return self.answers("release", tags)

    def resume(self, tags, timeout):
        self.mapped |= set(tags)
        return self.answers("resume", tags)

    def answers(self, operation, tags):
        self.number += 1
        return [
            Answer(name, operation, tuple(tags), self.released, number=self.number)
            for name in ("first", "second")
        ]

    @property
    def released(self):
        return tuple({"kv_cache", "weights", "cuda_graph"} - self.mapped)

    def states(self, timeout):
        last = self.answers("release", ()) if self.number else [None, None]
        return [
            SchedulerState(name, self.released, self.idle, answer)
            for name, answer in zip(("first", "second"), last, strict=True)
        ]

    def flush(self, timeout):
        return self.idle

    def abort(self, timeout):
        self.idle = True

    def generate(self, prompt):
        assert self.mapped >= {"kv_cache", "weights"}
        return prompt * 2


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("query_seconds", [0.0, 0.03, 0.2])
def test_an_engine_that_stays_busy_is_busy_at_the_deadline(guarded, query_seconds):
    engine, queries = AnotherEngine(), itertools.count()
    if not guarded:
        engine.states = lambda timeout: []
    controller = EngineController(engine)
    engine.idle = False

    def slow(answer):
        """Answer like a server that needs `query_seconds` for each query after the first two."""

        def query(timeout):
            seconds = query_seconds if next(queries) > 1 else 0.0
            if timeout < max(seconds, 0.002):
                time.sleep(timeout)
                raise EngineTimeoutError(f"no answer within {timeout:.3f} s")
            time.sleep(seconds)
            return answer(timeout)

        return query

    engine.states, engine.flush = slow(engine.states), slow(engine.flush)
    started = time.monotonic()
    with pytest.raises(EngineBusyError):
        controller.sleep(wait_idle=True, timeout=0.1)
    assert time.monotonic() - started < 1 and controller.status is Status.AWAKE


def test_the_timeout_of_asleep_also_limits_the_wake_up(monkeypatch):
    engine, limits = AnotherEngine(), []
    resume = engine.resume
    monkeypatch.setattr(
        engine, "resume", lambda tags, timeout: limits.append(timeout) or resume(tags, timeout)
    )
    for timeout in (600, 5):
        with EngineController(engine).asleep(timeout=timeout):
            pass
    assert limits == pytest.approx([600, 5], abs=2)


def test_rollouts_and_lightrft_import_no_engine_and_a_local_engine_no_httpx(run_python):
    run_python(
        """
import sys
import memsaver.integrations.lightrft, memsaver.integrations.rollout.rollout_engine
import memsaver.integrations.engine.sleep, memsaver.integrations.rollout.weights
import memsaver.integrations.rollout.session, memsaver.integrations.engine.moves
engines = ("memsaver.integrations.sglang", "memsaver.integrations.vllm")
assert not [name for name in sys.modules if name.startswith(engines)]
import memsaver.integrations.sglang.hooks, memsaver.integrations.sglang.plugin
import memsaver.integrations.sglang.sleep
assert not {"httpx", "httpcore", "h11"} & set(sys.modules)
        """
    )


class AdmittingEngine(AnotherEngine):
    """An engine that wakes up for requests."""

    def __init__(self, when) -> None:
        super().__init__()
        self.when = when

    def states(self, timeout):
        return [replace(state, when_asleep=self.when) for state in super().states(timeout)]

    def generate(self, prompt):
        self.mapped |= {"kv_cache", "weights", "cuda_graph"}
        return super().generate(prompt)


@pytest.mark.parametrize("when", ["wait", "wake"])
def test_requests_are_passed_on_to_an_engine_that_holds_them_or_wakes_up(when):
    controller = EngineController(AdmittingEngine(when))
    controller.sleep()
    assert controller.status is Status.ASLEEP
    controller.check("update_weights")
    assert controller.generate("a") == "aa"
    assert controller.refresh() is Status.AWAKE
    assert set(controller.sleep().changed) == {"kv_cache", "weights", "cuda_graph"}
    with controller.request():
        pass
