"""Tests requests while the recorded state of a sleeping vLLM engine's memory is out of date."""

import pytest


@pytest.mark.parametrize(
    "calls",
    [
        # A partial release, which another client replaces by a sleep that discards the weights.
        """
await engine.collective_rpc("memsaver_release", args=(["kv_cache"], 1))
await other("wake_up", None)
await other("sleep", 2, "abort")
    """,
        # vLLM ignores the second sleep.
        """
await other("sleep", 2, "abort")
await engine.sleep(1)
    """,
    ],
    ids=["after a partial release", "before a sleep that vLLM ignores"],
)
def test_a_request_does_not_wake_weights_that_another_client_has_discarded(asleep, calls):
    asleep(
        f"""
before = await generate(engine)
await engine.sleep()
await engine.wake_up()
other = engine.engine_core.call_utility_async
{calls.strip()}
assert "weights has no backup" in str(await refusal(generate(engine)))
assert await engine.is_sleeping()
await engine.update_weights(1)  # only replaces the contents, so it wakes the weights
await engine.collective_rpc("start_weight_update")
await engine.finish_weight_update()
assert await generate(engine) == before
""",
        when="wake",
    )


def test_a_wake_up_that_vllm_ignores_is_not_recorded(asleep):
    """vLLM ignores a wake-up of several tags if one of them is mapped."""
    asleep(
        """
before = await generate(engine)
await engine.sleep()
await engine.wake_up(tags=["weights"])
await engine.wake_up(tags=["weights", "kv_cache", "scheduling"])
assert admission_of(engine).released == {"kv_cache"}
assert (await refusal(generate(engine))).tags == ("kv_cache",)
await engine.wake_up(tags=["kv_cache", "scheduling"])
assert await generate(engine) == before
"""
    )


@pytest.mark.parametrize("when", ["refuse", "wake"])
def test_a_sleep_whose_caller_stops_waiting_is_known_to_later_requests(asleep, when):
    asleep(
        f"""
before = await generate(engine)
server = Server(engine)
busy = asyncio.ensure_future(engine.collective_rpc(blocked, args=(0.6,)))
await asyncio.sleep(0.1)
try:
    await asyncio.wait_for(engine.sleep(), 0.1)
except asyncio.TimeoutError:
    await busy
await until(engine.is_sleeping)
status, body = await server.call("/health")
assert json.loads(body) == {{"status": "asleep", "tags": list(BOTH)}}, (status, body)
if {when!r} == "refuse":
    assert (await refusal(generate(engine))).tags == BOTH
    await engine.wake_up()
assert await generate(engine) == before
""",
        when=when,
    )


def test_an_idle_engine_whose_weights_were_discarded_earlier_is_woken(asleep):
    asleep(
        """
import operator
before = await generate(engine)
await engine.sleep(level=2)
await engine.wake_up()
await engine.collective_rpc(operator.methodcaller("reload_weights"))  # as a program's own method
assert await generate(engine) == before
await until(engine.is_sleeping)  # at level 1
assert await generate(engine) == before
""",
        when="wake",
        after=1,
    )
