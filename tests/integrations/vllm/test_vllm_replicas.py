"""Tests an `AsyncLLM` of the fake vLLM with several data-parallel engine cores."""


def test_data_parallel_engine_cores_sleep_and_wake_each_by_itself(asleep):
    asleep(
        """
before = [await generate(engine) for _ in range(2)]
client = engine.engine_core
await client._call_utility_async("sleep", 1, "abort", engine=1)
assert [await generate(engine) for _ in range(2)] == before
assert not await client._call_utility_async("is_sleeping", engine=1)
await client._call_utility_async("sleep", 1, "abort", engine=0)
await client._call_utility_async("sleep", 1, "abort", engine=1)
await client._call_utility_async("wake_up", ["weights"], engine=1)
assert [await generate(engine) for _ in range(4)] == before * 2
""",
        engine="engine_of(data_parallel_size=2)",
        when="wake",
    )


def test_a_controller_sees_all_data_parallel_engine_cores(asleep):
    asleep(
        """
from memsaver.integrations.vllm import SleepController
from memsaver.integrations.vllm.backend import backend_of

async def states():
    found = [json.loads(await call("memsaver_memory", engine=core)) for core in (0, 1)]
    return [one["released"] for one in found]

def control():
    backend = backend_of(engine, timeout=30)
    assert refused(ConfigError, backend.begin_update, 10)
    return backend.control

call = engine.engine_core._call_utility_async
before = [await generate(engine) for _ in range(2)]
control = await asyncio.to_thread(control)
first = asyncio.ensure_future(generate(engine, "first"))
await first
busy = asyncio.ensure_future(generate(engine, "busy", 100000))  # on the second core
await until(lambda: asyncio.sleep(0, engine.output_processor.request_states))
assert await asyncio.to_thread(refused, EngineBusyError, control.sleep)
assert await states() == [[], []]
await engine.abort("busy")
await busy
await call("collective_rpc", vllm_calls.limit_host, None, (1 << 10,), None, engine=1)
assert await asyncio.to_thread(refused, OutOfHostMemoryError, control.sleep)
assert await states() == [list(BOTH), []] and control.released == {*BOTH, "cuda_graph"}
await asyncio.to_thread(control.wake_up)
assert await states() == [[], []]
await call("collective_rpc", vllm_calls.limit_host, None, (1 << 40,), None, engine=1)
for tags in (None, "weights"):
    await asyncio.to_thread(control.sleep, tags)
    assert await states() == [list(BOTH if tags is None else [tags])] * 2
    await asyncio.to_thread(control.wake_up)
    assert await states() == [[], []]
assert [await generate(engine) for _ in range(2)] == before
""",
        engine="engine_of(data_parallel_size=2)",
    )
