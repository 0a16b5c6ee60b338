"""Test sleeps of an `AsyncLLM` of the fake vLLM that fail or are repeated."""

import pytest


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_generation_continues_after_a_sleep_that_failed(asleep, mode):
    asleep(
        f"""
before = await generate(engine)
running = asyncio.ensure_future(generate(engine, "running", 60))
await until(lambda: asyncio.sleep(0, engine.output_processor.request_states))
await engine.collective_rpc(vllm_calls.limit_host, args=(1 << 10,))
try:
    await engine.sleep(mode="{mode}")
except OutOfHostMemoryError:
    assert not await engine.is_sleeping()
else:
    raise AssertionError
assert (await running)[1] == ("length" if "{mode}" == "wait" else "abort")
assert await generate(engine) == before
await engine.pause_generation(mode="keep")
try:
    await engine.sleep()
except OutOfHostMemoryError:
    assert await engine.is_paused()
else:
    raise AssertionError
await engine.resume_generation()
assert await generate(engine) == before
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
try:
    await engine.release_kv_cache_memory()
except EngineError as error:
    assert "discard is broken" in str(error)
else:
    raise AssertionError
await engine.wake_up()
assert await generate(engine) == before
await engine.sleep()
await refusal(generate(engine))
await engine.wake_up()
assert await generate(engine) == before
""",
        VLLM_FAKE_VERSION="0.33.0",
    )


def test_an_error_of_vllms_own_is_unchanged_after_a_failed_sleep(asleep):
    asleep(
        """
async def error_of(work):
    try:
        await work
    except Exception as error:
        return error

own = await error_of(engine.sleep(mode="unknown"))
assert type(own) is Exception and "Invalid pause mode" in str(own)
await engine.collective_rpc(vllm_calls.limit_host, args=(1 << 10,))
assert isinstance(await error_of(engine.sleep()), OutOfHostMemoryError)
again = await error_of(engine.sleep(mode="unknown"))
assert type(again) is Exception and str(again) == str(own)
"""
    )
