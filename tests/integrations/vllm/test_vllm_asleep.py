"""Tests requests to a sleeping `AsyncLLM` whose engine core is the fake vLLM's."""

import pytest


@pytest.mark.each_python
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_requests_are_refused_while_memory_is_released(asleep, version):
    asleep(
        """
before = await generate(engine)
for level, tags in ((1, BOTH), (2, BOTH)):
    await engine.sleep(level=level)
    error = await refusal(generate(engine))
    assert error.tags == tags and error.status_code == 503 and "cannot generate" in str(error)
    assert "cannot compute embeddings" in str(await refusal(embed(engine)))
    assert "load a LoRA adapter" in str(await refusal(engine.add_lora("adapter")))
    assert "update its weights" in str(await refusal(engine.update_weights(3)))
    if hasattr(engine, "compute_weight_checksums"):
        assert "read its weights" in str(await refusal(engine.compute_weight_checksums()))
    await engine.wake_up(tags=["weights"])
    error = await refusal(generate(engine))
    assert error.tags == ("kv_cache",)
    await engine.update_weights(1)  # the weights are mapped
    assert await engine.add_lora("adapter")
    await engine.wake_up(tags=["kv_cache"])
    assert await generate(engine) == before
    """,
        VLLM_FAKE_VERSION=version,
    )


def test_the_engine_core_refuses_what_another_client_has_put_to_sleep(asleep):
    """The engine's own record of the released tags is out of date."""
    asleep(
        """
before = await generate(engine)
await engine.engine_core.call_utility_async("sleep", 1, "abort")
assert not admission_of(engine).released
for work in (generate(engine), embed(engine), engine.add_lora("a"), engine.update_weights(1)):
    assert (await refusal(work)).tags == BOTH
    admission_of(engine).learn(())
await engine.engine_core.call_utility_async("wake_up", None)
assert await generate(engine) == before
await engine.sleep()
await engine.engine_core.call_utility_async("wake_up", None)
assert await generate(engine) == before  # refused only after a query
"""
    )


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_requests_wait_in_order_until_another_caller_wakes_the_engine(asleep, data_parallel):
    asleep(
        f"data_parallel = {data_parallel}\n"
        """
before = await generate(engine)
await engine.sleep()
ended = []
async def one(name):
    assert await generate(engine, name) == before
    ended.append(name)
waiting = [asyncio.ensure_future(one(str(number))) for number in range(6)]
waiting.append(asyncio.ensure_future(engine.add_lora("adapter")))
await asyncio.sleep(1.5)
assert not ended and admission_of(engine).waiting == 7
waiting[2].cancel()  # a client that disconnects
await engine.abort("4")
await engine.wake_up(tags=["weights"])
await asyncio.sleep(0.5)
assert not ended and waiting[6].done()
await engine.wake_up(tags=["kv_cache"])
results = await asyncio.gather(*waiting, return_exceptions=True)
assert isinstance(results[2], asyncio.CancelledError)
assert "aborted while it waited" in str(results[4]), results[4]
assert (sorted(ended) if data_parallel > 1 else ended) == ["0", "1", "3", "5"]
assert admission_of(engine).waiting == 0
""",
        engine=f"engine_of(data_parallel_size={data_parallel})",
        when="wait",
    )


@pytest.mark.each_python
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("ranks", ["", "distributed_executor_backend='mp', world_size=2"])
def test_requests_wake_the_engine(asleep, version, ranks):
    asleep(
        """
import operator
import vllm
before = await generate(engine)
for _ in range(2):
    await engine.sleep()
    assert await asyncio.gather(*(generate(engine, str(n)) for n in range(5))) == [before] * 5
    assert not await engine.is_sleeping()
await engine.sleep()
states = []
engine.logger_manager = SimpleNamespace(record_sleep_state=lambda *state: states.append(state))
await engine.add_lora("adapter")  # wakes the weights only
assert not states
assert (await engine.is_sleeping()) and admission_of(engine).released == {"kv_cache"}
assert await generate(engine) == before
assert states == [(0, 0)]
engine.logger_manager = None
await engine.sleep(level=2)
error = await refusal(generate(engine))
assert "weights has no backup" in str(error) and await engine.is_sleeping()
await engine.update_weights(1)  # only replaces the contents, so it wakes the weights
error = await refusal(generate(engine))
assert error.tags == ("kv_cache",) and "load all of weights" in str(error)
await engine.collective_rpc("start_draft_weight_update")
await engine.finish_weight_update()
assert (await refusal(generate(engine))).tags == ("kv_cache",)
await engine.collective_rpc("start_weight_update")
await engine.wake_up(["kv_cache"])
await engine.sleep(level=2)
await engine.wake_up(["weights"])
await engine.finish_weight_update()  # of an update that began before the weights were discarded
assert (await refusal(generate(engine))).tags == ("kv_cache",)
await engine.collective_rpc("start_weight_update")
await engine.update_weights(1)
if vllm.__version__ == "0.26.0":
    await engine.sleep(level=2)  # does nothing, because the KV cache is asleep
await engine.finish_weight_update()
assert await generate(engine) == before
await engine.sleep(level=2)
await engine.wake_up(["weights"])
await engine.collective_rpc(operator.methodcaller("reload_weights"))  # as a program's own method
assert (await refusal(generate(engine))).tags == ("kv_cache",)
await engine.wake_up(["kv_cache"])  # the program has loaded the weights
assert await generate(engine) == before
""",
        engine=f"engine_of({ranks})",
        VLLM_FAKE_VERSION=version,
        when="wake",
    )


@pytest.mark.parametrize("when", ["refuse", "wait", "wake"])
def test_sleep_under_load(asleep, when):
    """Requests in progress end as vLLM's mode defines; requests that arrive during the sleep are
    new.
    """
    asleep(
        f"""
when = {when!r}
token = (await generate(engine))[0]
for mode in ("abort", "keep", "wait"):
    running = asyncio.ensure_future(generate(engine, f"running, {{mode}}", max_tokens=40))
    await asyncio.sleep(0.1)
    sleeping = asyncio.ensure_future(engine.sleep(1, mode))
    await asyncio.sleep(0.1)  # with mode "wait", the engine core has not released memory yet
    late = asyncio.ensure_future(generate(engine, f"late, {{mode}}"))
    await sleeping
    tokens, reason = (await running) if mode != "keep" else (None, None)
    if mode == "abort":
        assert reason == "abort" and len(tokens) < 40
    elif mode == "wait":
        assert reason == "length" and tokens == token * 40
    if when == "refuse":
        assert (await refusal(late)).tags == BOTH
    elif when == "wait":
        await asyncio.sleep(0.3)
        assert not late.done()
    if when != "wake":
        await engine.wake_up()
    if when != "refuse":
        assert (await late)[0] == token
    if mode == "keep":  # continues after the wake-up
        assert (await running) == (token * 40, "length")
""",
        when=when,
    )


@pytest.mark.parametrize("when", ["refuse", "wake"])
def test_a_sleep_that_waits_does_not_keep_requests_that_have_not_begun(asleep, when):
    """The engine core receives the request and the call to sleep at the same time."""
    asleep(
        f"""
before = await generate(engine)
busy = asyncio.ensure_future(engine.collective_rpc(blocked, args=(0.5,)))
await asyncio.sleep(0.1)
request = asyncio.ensure_future(generate(engine, "late"))
await asyncio.sleep(0.1)
await engine.sleep(1, "wait")
await busy
if {when!r} == "wake":
    assert await asyncio.wait_for(request, 10) == before
else:
    assert (await asyncio.wait_for(refusal(request), 10)).tags == BOTH
    await engine.wake_up()
assert await generate(engine) == before
""",
        when=when,
        wait=8,
    )


def test_clients_that_sleep_and_wake_at_once(asleep):
    asleep(
        """
before = await generate(engine)
async def change(number):
    for _ in range(10):
        await (engine.sleep(1, "wait") if number % 2 else engine.wake_up())
async def requests():
    for number in range(20):
        assert await generate(engine, str(number)) == before
await asyncio.gather(*(change(number) for number in range(4)), requests())
await engine.wake_up()
assert await generate(engine) == before
""",
        when="wake",
        wait=60,
    )


def test_bad_arguments_and_repeated_calls_leave_the_engine_alive(asleep):
    asleep(
        """
before = await generate(engine)
await engine.wake_up()  # is awake
for level in (3, -1, "1"):
    with raising(ConfigError) as caught:
        await engine.sleep(level=level)
    assert "must be 0" in str(caught.error)
    assert not await engine.is_sleeping()
await engine.sleep()
await engine.sleep()
await engine.wake_up(tags=["nonsense"])  # vLLM logs it
assert await engine.is_sleeping() and (await refusal(generate(engine))).tags == BOTH
await engine.resume_generation()  # the scheduler must not use released memory
assert (await refusal(generate(engine))).tags == BOTH
await engine.wake_up()
assert await generate(engine) == before
"""
    )


def test_vllms_own_pauses_are_unchanged(asleep):
    """Requests to an engine that is paused or sleeps at level 0 wait in vLLM's scheduler."""
    asleep(
        """
before = await generate(engine)
for pause, resume in (
    (lambda: engine.pause_generation(mode="keep"), engine.resume_generation),
    (lambda: engine.sleep(level=0), lambda: engine.wake_up(tags=["scheduling"])),
):
    await pause()
    waiting = asyncio.ensure_future(generate(engine))
    await asyncio.sleep(0.3)
    assert not waiting.done() and await engine.is_paused()
    await resume()
    assert await waiting == before
"""
    )


@pytest.mark.parametrize("when", ["refuse", "wake"])
def test_without_memsaver_requests_wait_in_vllms_scheduler(asleep, when):
    """vLLM's own allocator manages the memory."""
    asleep(
        """
await generate(engine)
for _ in range(2):
    await engine.sleep()
    waiting = asyncio.ensure_future(generate(engine))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await engine.wake_up()
    assert await waiting == await generate(engine)
""",
        MEMSAVER_VLLM=0,
        when=when,
    )


@pytest.mark.parametrize("failing", [False, True])
def test_another_allocator_is_noticed_at_a_sleep_after_queries_that_could_not_show_it(
    asleep, failing
):
    asleep(
        f"failing = {failing}\n"
        """
from memsaver.integrations.vllm import admissions, cores
async def memory(*_, **__):
    if failing:
        raise ConnectionError("no answer")
    return cores.Memory(frozenset(), frozenset(), await engine.is_sleeping(), None)
admissions.memory_of_async = memory
await engine.sleep() if failing else await engine.wake_up(tags=[])
await engine.wake_up()
assert admission_of(engine) is not None
failing = False
await engine.sleep()
assert admission_of(engine) is None
"""
    )


def test_a_failed_sleep_keeps_its_error_if_the_query_of_the_state_has_no_answer(asleep):
    asleep(
        """
from memsaver.integrations.engine import shared_query
from memsaver.integrations.vllm import admissions
async def hanging(*_, **__):
    await asyncio.Event().wait()
async def failing(*_, **__):
    raise RuntimeError("it failed")
shared_query.QUERY_SECONDS = admissions.QUERY_SECONDS = 0.1
admissions.memory_of_async = hanging
engine.engine_core.call_utility_async = failing
try:
    await asyncio.wait_for(engine.sleep(), 20)
except RuntimeError as error:
    assert str(error) == "it failed"
else:
    raise AssertionError("the sleep did not fail")
"""
    )


@pytest.mark.parametrize("when", ["wait", "wake"])
def test_held_requests_can_be_aborted_after_memsaver_stops_managing_the_memory(asleep, when):
    """A query has found another allocator.

    Held requests can be aborted before vLLM has received them.
    """
    asleep(
        """
from memsaver.integrations.vllm import admissions, cores
before = await generate(engine)
await engine.sleep()
admission = admission_of(engine)
async def others(*_, **__):
    return cores.Memory(frozenset(), frozenset(), True, None)
async with admission.changing:  # no wake-up
    held = [asyncio.ensure_future(generate(engine, name)) for name in "ab"]
    await asyncio.sleep(0.3)
    await engine.engine_core.call_utility_async("wake_up", None)
    admissions.memory_of_async = others
    await admission.refresh()
    assert admission_of(engine) is None and not held[0].done()
    await engine.abort("a")
results = await asyncio.gather(*held, return_exceptions=True)
assert "aborted while it waited" in str(results[0]), results
assert results[1] == before
await engine.abort(["a", "b"])
assert await generate(engine, "a") == before
""",
        when=when,
    )


@pytest.mark.parametrize("when", ["wait", "wake"])
def test_held_requests_end_with_an_engine_whose_worker_is_killed(asleep, when):
    asleep(
        """
import os, signal
from vllm.v1.engine.exceptions import EngineDeadError
await generate(engine)
(pid,) = await engine.collective_rpc(os_pid)
await engine.sleep()
held = asyncio.ensure_future(engine.add_lora("a")) if when == "wait" else None
waiting = [asyncio.ensure_future(generate(engine, str(n))) for n in range(3) if when == "wait"]
await asyncio.sleep(0.2)
os.kill(pid, signal.SIGKILL)
if when == "wake":
    waiting = [asyncio.ensure_future(generate(engine, str(n))) for n in range(3)]
for one in waiting:
    with raising(Exception) as caught:
        await one
    # A wake-up fails by itself if it comes before the engine core has noticed.
    is_wake_up = when == "wake" and "could not be woken: Call to wake_up" in str(caught.error)
    assert is_wake_up or type(caught.error) is EngineDeadError, repr(caught.error)
if held is not None:
    with raising(EngineDeadError):
        await held
async def has_ended():
    return engine.errored
await until(has_ended)
with raising(EngineDeadError):
    await generate(engine)
""".replace("when ==", f"{when!r} ==").replace("os_pid", "vllm_calls.pid"),
        engine="engine_of(distributed_executor_backend='mp')",
        when=when,
        wait=60,
    )


def test_two_engines_of_one_process_sleep_independently(asleep):
    asleep(
        """
async with engine_of() as other:
    before = await generate(engine)
    await other.sleep()
    assert (await refusal(generate(other))).tags == BOTH
    assert await generate(engine) == before
    await engine.sleep()
    await other.wake_up()
    assert await generate(other) == before
    assert (await refusal(generate(engine))).tags == BOTH
    await engine.wake_up()
    assert await generate(engine) == before
"""
    )


@pytest.mark.parametrize("when", ["refuse", "wake"])
def test_a_controller_and_requests_share_one_state(asleep, when):
    """The admission of requests considers memory that memsaver's own calls have released or
    resumed.
    """
    asleep(
        f"""
from memsaver.integrations.vllm.protocol import RELEASE, RESUME
when = {when!r}
before = await generate(engine)
for tags in (["weights"], ["kv_cache"], ["kv_cache", "weights"]):
    (answer,) = await engine.collective_rpc(RELEASE, args=(tags, 1))
    assert answer["failure"] is None, answer
    assert admission_of(engine).released == set(tags)
    if when == "refuse":
        assert set((await refusal(generate(engine))).tags) == set(tags)
        (answer,) = await engine.collective_rpc(RESUME, args=(tags,))
        assert answer["failure"] is None and not admission_of(engine).released
    assert await generate(engine) == before
await engine.collective_rpc(RELEASE, args=(["weights"], 2))
assert (await refusal(generate(engine))).tags == ("weights",)
await engine.wake_up()
""",
        when=when,
    )
