"""Tests a fake vLLM engine's sleeps that fail, are repeated, or release only one tag."""

import pytest


def test_generation_continues_after_a_sleep_that_failed(asleep):
    asleep(
        """
async def own_error():
    with raising(Exception) as caught:
        await engine.sleep(mode="unknown")
    return type(caught.error), str(caught.error)

before, own = await generate(engine), await own_error()
assert own[0] is Exception and "Invalid pause mode" in own[1]
for mode, reason in (("abort", "abort"), ("wait", "length")):
    running = asyncio.ensure_future(generate(engine, mode, 60))
    await until(lambda: asyncio.sleep(0, engine.output_processor.request_states))
    # The engine core receives the request before this call.
    await engine.collective_rpc(vllm_calls.limit_host, args=(1 << 10,))
    with raising(OutOfHostMemoryError):
        await engine.sleep(mode=mode)
    assert not await engine.is_sleeping()
    assert (await running)[1] == reason
    assert await generate(engine) == before
await engine.pause_generation(mode="keep")
with raising(OutOfHostMemoryError):
    await engine.sleep()
assert await engine.is_paused()
await engine.resume_generation()
assert await generate(engine) == before
assert await own_error() == own  # an error of vLLM's own
"""
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_only_a_sleep_that_releases_the_weights_discards_them(asleep, version):
    asleep(
        f"""
from memsaver.integrations.vllm.protocol import RELEASE
before = await generate(engine)
await engine.sleep(1)
await engine.sleep(2)  # "already sleeping"
assert await generate(engine) == before
await engine.collective_rpc(RELEASE, args=(["kv_cache"], 1))
await engine.sleep(2)
if "{version}" == "0.26.0":  # "already sleeping"
    assert await generate(engine) == before
else:
    assert "weights" in str(await refusal(generate(engine)))
""",
        when="wake",
        VLLM_FAKE_VERSION=version,
    )


def test_requests_are_refused_after_a_first_release_that_failed(asleep):
    asleep(
        """
before = await generate(engine)
await engine.pause_generation(mode="keep")
await engine.collective_rpc(vllm_calls.break_next, args=("discard",))
with raising(EngineError) as caught:
    await engine.release_kv_cache_memory()
assert "discard is broken" in str(caught.error)
await engine.wake_up()
assert await generate(engine) == before
await engine.sleep()
await refusal(generate(engine))
await engine.wake_up()
assert await generate(engine) == before
""",
        VLLM_FAKE_VERSION="0.33.0",
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_a_sleep_saves_what_is_created_with_the_kv_cache_and_not_the_cache(run_vllm, version):
    run_vllm(
        """
def rows():
    return {row.tag: row for row in memsaver.stats().tags}

llm = LLM(enable_sleep_mode=True)
assert rows()["kv_cache"].resident_bytes == 8 << 20
before = llm.collective_rpc(vllm_calls.constants)
for level in (1, 2):
    llm.sleep(level)
    assert not any(row.resident_bytes for row in rows().values())
    assert rows()["kv_cache"].backup_bytes == 0 < rows()["runtime"].backup_bytes
    llm.wake_up(["kv_cache"])
    assert llm.collective_rpc(vllm_calls.constants) == before
    llm.wake_up()
        """,
        VLLM_FAKE_VERSION=version,
    )


def test_an_llm_releases_only_its_kv_cache(run_vllm):
    run_vllm(
        """
llm = LLM(enable_sleep_mode=True)
first = llm.generate(PROMPTS)
for _ in range(2):
    llm.sleep(level=0)
    llm.release_kv_cache_memory()
    (state,) = llm.collective_rpc("memsaver_state")
    assert state["released"] == ("kv_cache",)
    llm.wake_up(["kv_cache"])
    assert llm.generate(PROMPTS) == first
llm.shutdown()
        """,
        VLLM_FAKE_VERSION="0.33.0",
        VLLM_ENABLE_V1_MULTIPROCESSING=1,
    )


@pytest.mark.long
def test_no_memory_grows_over_1000_cycles_of_an_engine(run_vllm):
    run_vllm(
        """
import resource
llm = LLM(enable_sleep_mode=True)
first = llm.generate(PROMPTS)
asleep, awake, peaks = set(), set(), []
for cycle in range(1000):
    level = 2 if cycle % 100 == 99 else 1
    llm.sleep(level)
    asleep.update(llm.collective_rpc(vllm_calls.used) if cycle >= 10 else ())
    for tag in ("weights", "kv_cache"):
        llm.wake_up([tag])
    awake.update(llm.collective_rpc(vllm_calls.used) if cycle >= 10 else ())
    if level == 2:
        llm.collective_rpc("reload_weights")
        assert llm.generate(PROMPTS) == first
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
assert len(asleep) == len(awake) == 1 and max(asleep) < min(awake)
assert peaks[-1] - peaks[0] < 8 << 10, peaks  # KiB
        """,
        timeout=110,
    )


def test_a_held_request_that_fails_is_refused_and_the_later_ones_continue(run_vllm):
    run_vllm(
        """
import queue
from concurrent.futures import Future
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from memsaver.integrations.engine.refusals import asleep_in
from memsaver.integrations.vllm.guard import guard_of
llm = LLM(enable_sleep_mode=True)
core = llm.llm_engine.engine_core.engine_core
core.output_queue, guard, drained, begun = queue.Queue(), guard_of(core), Future(), []
def dispatch(kind, request):
    if request[0].request_id == "bad":
        raise ValueError("an unsupported task")
    begun.append(request[0].request_id)
guard.sleep(lambda: drained, 1)
for name in ("a", "bad", "b", "c"):
    guard.handle(dispatch, EngineCoreRequestType.ADD, (EngineCoreRequest(name, [1]), 0))
assert not begun
drained.set_exception(RuntimeError("the sleep failed"))
assert begun == ["a", "b", "c"]
_, answer = core.output_queue.get_nowait()
[output] = answer.outputs
assert output.request_id == "bad" and answer.finished_requests == {"bad"}
assert "an unsupported task" in str(asleep_in(output.stop_reason))
llm.shutdown()
        """
    )
