"""Tests TRL's sequence of calls to a colocated engine, with the fake vLLM."""

import pytest

START = """
import os, trl_calls
from vllm.model_executor.models.tiny import checkpoint

def asleep():
    return not any(vllm_calls.resident(None).values())

llm = LLM("tiny", enable_sleep_mode=True, distributed_executor_backend="external_launcher")
expected = []
for seed in (1, 2, 3):
    trl_calls.model_of(llm).load_weights(checkpoint(seed).items())
    expected.append(llm.generate(PROMPTS))
assert expected[0] != expected[1] != expected[2] != expected[0]
trl_calls.start(llm)

def step(seed):
    assert trl_calls.step(llm, checkpoint(seed), PROMPTS) == expected[seed - 1] and asleep()

step(1)
"""

# Calls that fail or come in a wrong order within a step, and the error that ends the step, or None.
WRONG = {
    "generates before anything is awake": ("llm.generate(PROMPTS)", "AsleepError"),
    "generates without the weights": (
        "llm.wake_up(tags=['kv_cache']); llm.generate(PROMPTS)",
        "AsleepError",
    ),
    "generates without the KV cache": (
        "trl_calls.sync_weights(llm, checkpoint(2)); llm.generate(PROMPTS)",
        "AsleepError",
    ),
    "wakes the KV cache first": (
        "llm.wake_up(tags=['kv_cache']); trl_calls.sync_weights(llm, checkpoint(2)); "
        "assert llm.generate(PROMPTS) == expected[1]",
        None,
    ),
    "sleeps twice": ("llm.sleep(level=2)", None),
    "wakes twice": ("llm.wake_up(tags=['weights']); llm.wake_up(tags=['weights'])", None),
    "sends a tensor that the model lacks": (
        "trl_calls.sync_weights(llm, {'other.weight': None})",
        "ValueError",
    ),
    "has no memory for the weights": (
        "vllm_calls.occupy(trl_calls.worker_of(llm), vllm_calls.free(None)); "
        "trl_calls.sync_weights(llm, checkpoint(2))",
        "OutOfDeviceMemoryError",
    ),
    "has no memory for the KV cache": (
        "trl_calls.sync_weights(llm, checkpoint(2)); "
        "vllm_calls.occupy(trl_calls.worker_of(llm), vllm_calls.free(None)); "
        "trl_calls.generate(llm, PROMPTS)",
        "OutOfDeviceMemoryError",
    ),
    "raises while the engine generates": (
        "trl_calls.sync_weights(llm, checkpoint(2)); trl_calls.generate(llm, [None])",
        "TypeError",
    ),
    "raises in the engine's sleep": (
        "vllm_calls.break_next(trl_calls.worker_of(llm), 'suspend'); "
        "trl_calls.step(llm, checkpoint(2), PROMPTS)",
        "EngineError",
    ),
}


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_the_step_after_a_wrong_one_works(run_vllm, version):
    run_vllm(
        f"""
{START}
for name, (calls, error) in {WRONG}.items():
    try:
        exec(calls)
    except Exception as raised:
        assert type(raised).__name__ == error, (name, raised)
    else:
        assert error is None, name
    vllm_calls.occupy(trl_calls.worker_of(llm), 0)
    for seed in (2, 3):
        step(seed)
        """,
        timeout=120,
        with_torch=True,
        VLLM_FAKE_VERSION=version,
    )


@pytest.mark.parametrize("signal", ["", "signal.SIGALRM, TimeoutError"], ids=["SIGINT", "SIGALRM"])
def test_steps_go_on_after_an_interrupt_of_a_sleep_or_a_wake_up(run_vllm, signal):
    """An interrupt of vLLM's own `generate` can leave a request behind, regardless of the
    allocator.
    """
    run_vllm(
        f"""
{START}
import signal
from interrupter import Interrupter

def transitions():
    trl_calls.sync_weights(llm, checkpoint(2))
    llm.wake_up(tags=["kv_cache"])
    llm.sleep(level=2)

places = 0
for place in Interrupter({signal}).places(transitions, every=61):
    step(3)
    places += 1
assert places > 50, places
        """,
        timeout=120,
        with_torch=True,
    )
