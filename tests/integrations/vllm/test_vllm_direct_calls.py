"""Tests releases by workers' methods that a client of a fake vLLM calls through collective_rpc."""

import pytest

BOTH = {"kv_cache", "weights"}
# The version, the call, the released tags, and the state of the weights: kept, discarded
# (but the buffers are kept), or lost together with the buffers.
RELEASES = pytest.mark.parametrize(
    ("version", "call", "tags", "weights"),
    [
        ("0.33.0", ("discard", ["kv_cache"]), {"kv_cache"}, "kept"),
        ("0.33.0", ("discard", ("weights",)), {"weights"}, "lost"),
        ("0.33.0", ("sleep",), BOTH, "kept"),
        ("0.26.0", ("sleep", 2), BOTH, "discarded"),
    ],
)


@pytest.mark.parametrize("processes", [0, 1])
@RELEASES
def test_the_engine_refuses_requests_until_the_memory_is_mapped(
    run_vllm, version, call, tags, weights, processes
):
    run_vllm(
        f"""
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.vllm import SleepController, Status
def rpc(method, *arguments):
    return llm.collective_rpc(method, args=arguments)

llm = LLM(enable_sleep_mode=True)
first = llm.generate(PROMPTS)
control = SleepController(llm)
for wake_up in (
    llm.wake_up,
    control.wake_up,
    lambda: rpc("wake_up", {sorted(tags)}),
    lambda: rpc("wake_up", None),
):
    rpc(*{call})
    assert set(refused(EngineAsleepError, llm.generate, PROMPTS).tags) == {tags}
    assert control.refresh() is not Status.AWAKE
    assert control.released - {{"cuda_graph"}} == {tags}
    assert not any(rpc(vllm_calls.resident)[0][tag] for tag in {tags})
    wake_up()
    assert control.refresh() is Status.AWAKE
    if "{weights}" == "discarded":
        rpc("reload_weights")
    assert (llm.generate(PROMPTS) == first) == ("{weights}" != "lost")
rpc(*{call})
control.sleep()
assert not any(rpc(vllm_calls.resident)[0].values())
llm.shutdown()
        """,
        VLLM_FAKE_VERSION=version,
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )


@RELEASES
def test_a_request_wakes_the_engine_only_if_the_weights_are_kept(
    asleep, version, call, tags, weights
):
    asleep(
        f"""
before = await generate(engine)
method, *arguments = {call}
await engine.collective_rpc(method, args=arguments)
if "{weights}" == "kept":
    assert await generate(engine) == before
else:
    assert "weights" in (await refusal(generate(engine))).tags
        """,
        when="wake",
        VLLM_FAKE_VERSION=version,
    )


def test_a_queued_step_of_an_ended_request_does_not_prevent_a_release(run_vllm):
    run_vllm("""
from collections import deque
llm = LLM(enable_sleep_mode=True)
first = llm.generate(PROMPTS)
core = llm.llm_engine.engine_core.engine_core
core.batch_queue = deque(["a step that was scheduled before the request ended"])
llm.collective_rpc("sleep")
core.batch_queue.clear()
llm.collective_rpc("wake_up")
assert llm.generate(PROMPTS) == first
llm.shutdown()
    """)


def test_a_direct_wake_up_does_not_end_a_pause_of_the_client(asleep):
    asleep("""
await engine.pause_generation(mode="keep")
await engine.collective_rpc("wake_up")
assert await engine.is_sleeping()
await engine.collective_rpc("sleep", args=(1,))
for tag in ("weights", "kv_cache"):
    await engine.collective_rpc("wake_up", kwargs={"tags": [tag]})
assert await engine.is_sleeping()
    """)


@pytest.mark.parametrize("call", [("discard", ["kv_cache"]), ("sleep",)])
def test_memory_of_requests_in_flight_is_not_released(asleep, call):
    asleep(
        f"""
running = asyncio.ensure_future(generate(engine, max_tokens=300))
await until(lambda: asyncio.sleep(0, engine.output_processor.request_states))
method, *arguments = {call}
with raising(Exception) as caught:
    await engine.collective_rpc(method, args=arguments)
assert "requests in flight" in str(caught.error), caught.error
assert (await running)[1] == "length"
        """,
        VLLM_FAKE_VERSION="0.33.0",
    )
