"""Tests that each vLLM engine has its own policy for requests, with the fake vLLM."""

import pytest


def test_each_engine_keeps_the_policy_of_its_start(asleep):
    asleep(
        """
import os
os.environ.update(MEMSAVER_VLLM_ASLEEP="wait", MEMSAVER_VLLM_ASLEEP_WAIT="0.1")
async with engine_of() as second:
    os.environ["MEMSAVER_VLLM_ASLEEP"] = "refuse"
    for one, when in ((engine, "wake"), (second, "wait")):
        [state] = await one.collective_rpc("memsaver_state")
        assert state["when_asleep"] == when
        await one.sleep()
    assert await generate(engine)
    assert "no caller woke it up within 0.1 s" in str(await refusal(generate(second)))
""",
        when="wake",
    )


def test_an_llm_keeps_the_policy_of_its_start(run_vllm):
    """The worker, which is in the same process, also keeps the policy."""
    run_vllm(
        """
import os
llm = LLM(enable_sleep_mode=True)
os.environ["MEMSAVER_VLLM_ASLEEP"] = "refuse"
[state] = llm.collective_rpc("memsaver_state")
assert state["when_asleep"] == "wake"
llm.sleep()
assert llm.generate(PROMPTS)
llm.shutdown()
""",
        MEMSAVER_VLLM_ASLEEP="wake",
    )


@pytest.mark.parametrize("processes", [0, 1])
def test_a_held_request_of_an_llm_does_not_prevent_its_wake_up(run_vllm, processes):
    """The controller makes one call to an LLM at a time."""
    run_vllm(
        """
import threading, time
from memsaver.integrations.engine.errors import EngineAsleepError, EngineTimeoutError
from memsaver.integrations.engine.interface import Request
from memsaver.integrations.vllm.backend import backend_of
llm = LLM("tiny", enable_sleep_mode=True)
backend = backend_of(llm)
control = backend.control
def sampled(timeout=30):
    return backend.generate([Request([1, 2], {"max_tokens": 2})], timeout)
calls = (
    lambda: control.generate(PROMPTS),
    sampled,
    lambda: backend.begin_update(30) or backend.end_update(30),
)
before = [call() for call in calls]
for call, result in zip(calls, before):
    control.sleep()
    ended = []
    thread = threading.Thread(target=lambda: ended.append(call()))
    thread.start()
    time.sleep(0.3)
    control.wake_up("weights", timeout=1)
    time.sleep(0.1)
    assert bool(ended) == (call is calls[2])
    control.wake_up(timeout=1)
    thread.join(20)
    assert ended == [result]
control.sleep()
ended = []
thread = threading.Thread(target=lambda: ended.append(sampled()))
thread.start()
time.sleep(0.3)
backend.link.abort(5)
thread.join(1)
assert [sample.finish_reason for sample in ended[0]] == ["abort"], ended
begun = time.monotonic()
error = refused(EngineAsleepError, sampled)
assert "no caller woke it up within 2 s" in str(error) and time.monotonic() - begun < 3
assert error.status_code == 503
error = refused(EngineTimeoutError, sampled, 0.5)
assert "no caller woke" in str(error), error
control.wake_up()
assert sampled() == before[1]
llm.shutdown()
""",
        MEMSAVER_VLLM_ASLEEP="wait",
        MEMSAVER_VLLM_ASLEEP_WAIT=2,
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )


def test_each_engine_has_the_policy_of_its_launch(run_vllm):
    run_vllm(
        """
import os, time
from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RolloutEngine
def launched(**policy):
    return RolloutEngine.launch(
        kind="vllm", timeout=60, model="tiny", distributed_executor_backend="uni", **policy
    )
def generated(engine):
    return engine.generate([[1, 2]], {"max_tokens": 4}).token_ids.tolist()
for wrong in ({"asleep": "sleep"}, {"sleep_after": 1}, {"asleep": "wake", "sleep_after": "1"}):
    refused(ConfigError, lambda: launched(**wrong))
environment = dict(os.environ)
with launched(asleep="wake", sleep_after=1) as first, launched(asleep_wait=0.1) as second:
    assert os.environ == environment
    first_output = generated(first)
    end = time.monotonic() + 30
    while first.refresh() is not Status.ASLEEP:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert generated(first) == first_output
    second.sleep()
    error = refused(EngineAsleepError, lambda: generated(second))
    assert "no caller woke it up within 0.1 s" in str(error)
""",
        timeout=120,
        MEMSAVER_VLLM_ASLEEP="wait",
        VLLM_FAKE_START="fork",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
