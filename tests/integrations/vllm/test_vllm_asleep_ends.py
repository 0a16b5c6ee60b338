"""Tests that calls of a sleeping `AsyncLLM` end if they are aborted or if the engine core exits."""

import pytest


def test_an_abort_of_all_requests_ends_held_ones(asleep):
    """vLLM's route /abort_requests aborts all requests; a client's disconnection aborts only
    one.
    """
    asleep(
        """
from memsaver.integrations.engine.admission import RequestAbortedError
before = await generate(engine)
long = asyncio.ensure_future(generate(engine, "long", max_tokens=1000))
await asyncio.sleep(0.1)
await engine.sleep(1, "keep")
held = [asyncio.ensure_future(generate(engine, name)) for name in "ab"]
await asyncio.sleep(0.3)
assert admission_of(engine).waiting == 2
states = engine.output_processor.request_states
(name,) = states
await engine.abort(name, internal=True)  # as if its client had disconnected
await asyncio.sleep(1.2)
assert admission_of(engine).waiting == 2 and not states
await engine.abort([*states], internal=True)
for one in held:
    with raising(RequestAbortedError):
        await asyncio.wait_for(one, 5)
await asyncio.wait_for(long, 5)
await engine.wake_up()
assert await generate(engine) == before
""",
        when="wait",
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize(
    ("when", "end"),
    [
        ("refuse", "pass"),
        ("wait", "call.cancel()"),
        ("wait", "await engine.abort('b')"),
        ("wait", "await asyncio.sleep(2)"),
    ],
)
def test_an_image_of_a_request_that_was_not_sent_is_sent_with_the_next(asleep, version, when, end):
    asleep(
        f"""
engine.renderer = renderer = Renderer()
before = await generate(engine, prompt=renderer.render("A"))
await engine.sleep()
call = asyncio.ensure_future(generate(engine, "b", prompt=renderer.render("B")))
await asyncio.sleep(0.3)
{end}
with raising(BaseException):
    await asyncio.wait_for(call, 10)
await asyncio.sleep(0)
assert "B" not in renderer.sent
await engine.wake_up()
assert await generate(engine, prompt=renderer.render("B")) == before
assert "B" in renderer.sent
        """,
        when=when,
        wait=1.5,
        VLLM_FAKE_VERSION=version,
    )


def test_calls_end_with_an_engine_core_that_is_killed(asleep):
    asleep(
        """
import os, signal
from vllm.v1.engine.exceptions import EngineDeadError
(pid,) = await engine.collective_rpc(vllm_calls.pid)  # of the core itself
await engine.sleep()
await engine.wake_up(["weights"])
works = (
    engine.collective_rpc(blocked, args=(30.0,)),
    engine.collective_rpc("reload_weights"),
    engine.collective_rpc("memsaver_engine_state"),
    engine.add_lora("a"),
)
calls = [asyncio.ensure_future(work) for work in works]
await asyncio.sleep(0.5)
os.kill(pid, signal.SIGKILL)
await asyncio.wait(calls, timeout=8)
for call in calls:
    assert call.done() and type(call.exception()) is EngineDeadError, call
"""
    )
