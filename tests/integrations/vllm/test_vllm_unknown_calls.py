"""Tests calls of worker methods that memsaver does not know, in a sleeping fake vLLM."""

import pytest

START = """
import logging
from memsaver.integrations.engine.errors import EngineAsleepError

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logging.getLogger("vllm.memsaver").addHandler(Lines(logging.WARNING))
llm = LLM("tiny", enable_sleep_mode=True)
first = llm.generate(PROMPTS)

def broken(worker):
    raise ValueError("this call is broken")

def with_name(name):
    found = [line for line in lines if name in line]
    assert all("kv_cache, weights" in line and "memsaver does not know" in line for line in found)
    return len(found)
"""
END = """
llm.wake_up()
assert llm.generate(PROMPTS) == first
llm.shutdown()
"""


def test_an_unknown_method_of_a_sleeping_engine_is_in_the_log(run_vllm):
    run_vllm(f"""
{START}
llm.collective_rpc("_get_sleep_mode_backend")
llm.collective_rpc(vllm_calls.pid)
llm.sleep()
llm.collective_rpc("memsaver_state")
assert lines == []
assert len(llm.collective_rpc("_get_sleep_mode_backend")) == 1
assert len(llm.collective_rpc(vllm_calls.pid)) == 1
assert with_name("_get_sleep") == with_name("pid") == 1
llm.collective_rpc("_get_sleep_mode_backend")
assert with_name("_get_sleep") == 1  # later calls are not logged
with raising(ValueError):
    llm.collective_rpc(broken)
with raising(AttributeError):
    llm.collective_rpc("no_such_method")
assert with_name("broken") == with_name("no_such_method") == 1
for number in range(100):
    with raising(AttributeError):
        llm.collective_rpc(f"no_such_method_{{number}}")
assert len(lines) == 20
{END}""")


@pytest.mark.parametrize("when", ["refuse", "wait"])
def test_the_error_of_an_unknown_method_names_the_released_tags(asleep, when):
    asleep(
        """
before = await generate(engine)
await engine.sleep()
for method in ("no_such_method", vllm_calls.add_draft):
    with raising(Exception) as caught:
        await engine.collective_rpc(method, args=(1, 2, 3))
    name = method if isinstance(method, str) else method.__name__
    assert f"{name} ran while kv_cache, weights were released" in str(caught.error), caught.error
await engine.wake_up()
with raising(Exception) as caught:
    await engine.collective_rpc("no_such_method")
assert "released" not in str(caught.error)
assert await generate(engine) == before
""",
        when=when,
    )


def test_a_reset_of_released_weights_is_refused(asleep):
    asleep(
        """
before = await generate(engine)
await engine.sleep()
error = await refusal(engine.collective_rpc("reset_weights"))
assert error.tags == BOTH and "update its weights" in str(error)
await engine.wake_up()
assert await generate(engine) == before
"""
    )
