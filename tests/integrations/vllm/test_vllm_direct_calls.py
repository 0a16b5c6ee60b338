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


@pytest.mark.parametrize("call", [("discard", ["kv_cache"]), ("sleep",), ("sleep", 2)])
def test_a_kv_cache_whose_blocks_are_in_use_is_not_released(run_vllm, call):
    """For example, a transfer to another engine can use blocks of an ended request."""
    run_vllm(
        f"""
from memsaver.integrations.engine.errors import EngineBusyError
llm = LLM(enable_sleep_mode=True)
first = llm.generate(PROMPTS)
method, *arguments = {call}
core = llm.llm_engine.engine_core.engine_core
core.scheduler.reset_prefix_cache = lambda *_: False
error = refused(EngineBusyError, llm.collective_rpc, method, args=arguments)
assert "blocks of the KV cache" in str(error), error
assert all(llm.collective_rpc(vllm_calls.resident)[0].values())
assert llm.generate(PROMPTS) == first
del core.scheduler.reset_prefix_cache
llm.collective_rpc(method, args=arguments)
core.scheduler.reset_prefix_cache = lambda *_: False
llm.collective_rpc(method, args=arguments)  # the KV cache is already released
llm.shutdown()
        """,
        VLLM_FAKE_VERSION="0.33.0",
    )


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


@pytest.mark.parametrize(
    ("later", "is_paused"),
    [
        ("await engine.resume_generation()", False),
        ("await engine.resume_generation(); await engine.pause_generation(mode='keep')", True),
        ("await engine.resume_generation(); await engine.sleep(0, 'keep')", True),
    ],
)
def test_the_last_direct_wake_up_resumes_generation_for_an_earlier_call(asleep, later, is_paused):
    asleep(f"""
before = await generate(engine)
for _ in range(2):
    await engine.pause_generation(mode="keep")
    await engine.collective_rpc("sleep", args=(1,))
    await engine.collective_rpc("wake_up", kwargs={{"tags": ["weights"]}})
    {later}
    await engine.collective_rpc("wake_up", kwargs={{"tags": ["kv_cache"]}})
    assert await engine.is_paused() == {is_paused}
    await engine.resume_generation()
    assert await generate(engine) == before
    """)


@pytest.mark.parametrize("call", [("discard", ["kv_cache"]), ("sleep",)])
def test_memory_of_requests_in_flight_is_not_released(asleep, call):
    asleep(
        f"""
running = asyncio.ensure_future(generate(engine, max_tokens=300))
await until(lambda: asyncio.sleep(0, engine.output_processor.request_states))
method, *arguments = {call}
with raising(EngineBusyError) as caught:
    await engine.collective_rpc(method, args=arguments)
assert "requests in flight" in str(caught.error), caught.error
assert (await running)[1] == "length"
        """,
        VLLM_FAKE_VERSION="0.33.0",
    )


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("sleep", {"level": 0}, "level 0 only stops the scheduling"),
        ("sleep", {"level": 3}, "level 3 of sleep does not exist"),
        ("sleep", {"level": "1"}, "level '1' of sleep does not exist"),
        ("discard", {"tags": ["runtime"]}, "runtime cannot be discarded"),
        ("discard", {"tags": ["kv_cache", "cudagraph"]}, "cudagraph cannot be discarded"),
    ],
)
def test_calls_that_would_lose_memory_in_use_change_nothing(
    run_vllm, method, arguments, text, processes
):
    run_vllm(
        f"""
from memsaver.errors import ConfigError
llm = LLM(enable_sleep_mode=True)
first = llm.generate(PROMPTS)
for given in ({{"kwargs": {arguments}}}, {{"args": tuple({arguments}.values())}}):
    error = refused(ConfigError, llm.collective_rpc, {method!r}, **given)
    assert {text!r} in str(error), error
assert llm.generate(PROMPTS) == first
llm.shutdown()
        """,
        VLLM_FAKE_VERSION="0.33.0",
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_a_direct_call_on_a_sleeping_engine_keeps_what_was_saved(asleep, version):
    asleep(
        """
before = await generate(engine)
for level in (1, 2):
    await engine.collective_rpc("sleep", kwargs={"level": level})
for tags in ("weights", "kv_cache"):  # a string, as vLLM's own allocator accepts it
    await engine.collective_rpc("wake_up", kwargs={"tags": tags})
assert await generate(engine) == before
await engine.collective_rpc("sleep", args=(2,))
await engine.collective_rpc("wake_up", args=("weights",))
await engine.collective_rpc("reload_weights")
await engine.collective_rpc("wake_up")
assert await generate(engine) == before
        """,
        VLLM_FAKE_VERSION=version,
    )


def test_a_discard_that_fails_on_one_rank_is_undone_on_all(run_vllm):
    run_vllm(
        """
llm = LLM(enable_sleep_mode=True, tensor_parallel_size=2)
first = llm.generate(PROMPTS)
for given in ({"args": (["kv_cache"],)}, {"kwargs": {"tags": "kv_cache"}}):
    llm.collective_rpc(vllm_calls.break_next, args=("discard", 0))
    error = refused(Exception, llm.collective_rpc, "discard", **given)
    assert "index out of range" not in str(error), error
    assert all(all(rank.values()) for rank in llm.collective_rpc(vllm_calls.resident))
    assert llm.generate(PROMPTS) == first
llm.shutdown()
        """,
        VLLM_FAKE_VERSION="0.33.0",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )


@pytest.mark.parametrize("processes", [0, 1])
def test_an_engine_with_only_vllms_allocator_follows_the_policy(run_vllm, processes):
    run_vllm(
        """
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.vllm import SleepController
llm = LLM(enable_cumem_allocator=True)
first = llm.generate(PROMPTS)
control = SleepController(llm)
control.sleep()
error = refused(EngineAsleepError, llm.generate, PROMPTS)
assert set(error.tags) == {"kv_cache", "weights"}
control.wake_up()
assert llm.generate(PROMPTS) == first
llm.shutdown()
        """,
        VLLM_FAKE_VERSION="0.33.0",
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )
