"""Tests the HTTP responses of a sleeping vLLM server, with the fake vLLM's application."""

import pytest


@pytest.mark.each_python
def test_every_endpoint_refuses_with_status_503_and_the_tags(asleep):
    asleep(
        """
server = Server(engine)
paths = [
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "stream": True}),
    ("/v1/load_lora_adapter", {}),
]
before = [await server.call(*path) for path in paths]
assert all(status == 200 for status, _ in before) and (await server.call("/health"))[0] == 200
await server.call("/sleep?level=1")
for path in paths:
    status, body = await server.call(*path)
    found = json.loads(body)
    assert status == 503 and found["success"] is False and "asleep" in found["message"]
    error = found["error"]
    assert error["type"] == "engine_asleep" and error["tags"] == list(BOTH)
    assert error["code"] == 503 and error["param"] is None
status, body = await server.call("/health")
assert status == 503 and json.loads(body) == {"status": "asleep", "tags": list(BOTH)}
assert (await server.call("/ping"))[0] == 200
assert json.loads((await server.call("/is_sleeping"))[1]) == {"is_sleeping": True}
await server.call("/wake_up?tags=weights")
assert json.loads((await server.call("/health"))[1])["tags"] == ["kv_cache"]
await server.call("/wake_up")
assert [await server.call(*path) for path in paths] == before
assert (await server.call("/health"))[0] == 200
status, body = await server.call("/sleep?level=7")
assert status != 200 and b"level 7" in body and (await server.call("/health"))[0] == 200
"""
    )


def test_a_server_with_several_processes_queries_the_engine(asleep):
    """Another process of the server has put the engine to sleep."""
    asleep(
        """
server = Server(engine)
await engine.engine_core.call_utility_async("sleep", 1, "abort")
assert (await server.call("/health"))[0] == 503
admission_of(engine).learn(())
status, body = await server.call("/v1/completions", {"prompt": PROMPT, "stream": True})
assert status == 503 and json.loads(body)["error"]["tags"] == list(BOTH)
""",
        engine="engine_of(client_count=2)",
    )


def test_a_request_that_a_release_in_progress_overtakes_has_status_503_and_the_tags(asleep):
    """The server records a release only after the engine core has answered it."""
    asleep(
        """
server = Server(engine)
await engine.engine_core.call_utility_async("sleep", 1, "abort")
for path in (
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "stream": True}),
    ("/v1/load_lora_adapter", {}),
):
    admission_of(engine).learn(())
    status, body = await server.call(*path)
    assert status == 503 and json.loads(body)["error"]["tags"] == list(BOTH), (path, status, body)
"""
    )


def test_a_client_that_disconnects_no_longer_waits(asleep):
    asleep(
        """
server, leave = Server(engine), asyncio.Event()
before = await server.call("/v1/completions", {"prompt": PROMPT})
await engine.sleep()
gone = asyncio.ensure_future(server.call("/v1/completions", {"prompt": PROMPT}, leave))
stays = asyncio.ensure_future(server.call("/v1/completions", {"prompt": PROMPT}))
await asyncio.sleep(0.3)
assert admission_of(engine).waiting == 2
leave.set()
assert await gone == (None, b"")
assert admission_of(engine).waiting == 1 and not stays.done()
await engine.wake_up()
assert await stays == before
""",
        when="wait",
    )


def test_a_wake_up_without_memory_has_status_503_and_the_reason(asleep):
    asleep(
        """
server = Server(engine)
before = await server.call("/v1/completions", {"prompt": PROMPT})
await engine.sleep()
free = (await engine.collective_rpc(vllm_calls.free))[0]
await engine.collective_rpc(vllm_calls.occupy, args=(free - (1 << 20),))
status, body = await server.call("/v1/completions", {"prompt": PROMPT})
error = json.loads(body)["error"]
assert status == 503 and error["tags"] == list(BOTH) and "out of" in error["message"], error
await engine.collective_rpc(vllm_calls.occupy, args=(0,))
assert await server.call("/v1/completions", {"prompt": PROMPT}) == before
""",
        when="wake",
        wait=1,
    )


def test_the_first_refusal_after_an_idle_sleep_has_the_same_format(asleep):
    asleep(
        """
server = Server(engine)
await generate(engine)
for stream in (False, True):
    await engine.wake_up()
    await until(engine.is_sleeping)
    free = (await engine.collective_rpc(vllm_calls.free))[0]
    await engine.collective_rpc(vllm_calls.occupy, args=(free - (1 << 20),))
    assert not admission_of(engine).released
    body = {"prompt": PROMPT, "stream": stream}
    status, body = await server.call("/v1/completions", body)
    assert status == 503 and json.loads(body)["error"]["tags"] == list(BOTH), (status, body)
    await engine.collective_rpc(vllm_calls.occupy, args=(0,))
""",
        when="wake",
        wait=1,
        after=1,
    )


def test_the_health_of_an_engine_that_ended_while_it_was_asleep_is_vllms(asleep):
    asleep(
        """
import os, signal
server = Server(engine)
(pid,) = await engine.collective_rpc(vllm_calls.pid)
await engine.sleep()
assert (await server.call("/health"))[0] == 503
os.kill(pid, signal.SIGKILL)
async def has_ended():
    return engine.errored
await until(has_ended)
assert await server.call("/health") == await server.call("/ping")
""",
        engine="engine_of(distributed_executor_backend='mp')",
    )
