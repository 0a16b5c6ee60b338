"""Tests releases of a fake vLLM engine that was started without sleep mode."""

import pytest

START = """
from vllm_server import Server
from memsaver.errors import ConfigError
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.vllm import SleepController, Status

def check(engine, connected=None):
    control = SleepController(engine if connected is None else connected, timeout=30)
    rollout = RolloutEngine.connect(connected or engine, kind="vllm", timeout=30)
    for one, more in ((control, {}), (rollout, {}), (rollout, {"keep_weights": False})):
        error = refused(ConfigError, one.sleep, wait_idle=True, **more)
        assert "enable_sleep_mode=True" in str(error), error
        assert one.status is Status.AWAKE and one.refresh() is Status.AWAKE
    if control.guarded:
        for tag in ("kv_cache", "weights"):
            assert "enable_sleep_mode=True" in str(refused(ConfigError, control.sleep, tag))
"""
LLM = """
llm = LLM("tiny")
first = llm.generate(PROMPTS)
check(llm)
assert not llm.llm_engine.is_sleeping() and llm.generate(PROMPTS) == first
llm.shutdown()
"""
SERVED = """
llm = LLM("tiny")
first = llm.generate(PROMPTS)
server = Server(llm)
check(llm, server.url)
assert not llm.llm_engine.is_sleeping() and llm.generate(PROMPTS) == first
server.close()
llm.shutdown()
"""
ASYNC = """
import asyncio
from vllm.config import VllmConfig
from vllm.plugins import load_general_plugins
from vllm_requests import generate, run
load_general_plugins()
from vllm.v1.engine.async_llm import AsyncLLM
async def test():
    engine = AsyncLLM(VllmConfig(), 1)
    first = await generate(engine)
    await asyncio.to_thread(check, engine)
    assert not await engine.is_sleeping() and await generate(engine) == first
    engine.shutdown()
run(test())
"""


@pytest.mark.parametrize("plugin", [0, 1])
@pytest.mark.parametrize(
    ("lines", "processes"),
    [(LLM, 0), (LLM, 1), (SERVED, 0), (ASYNC, 1)],
    ids=["LLM in this process", "LLM", "server", "AsyncLLM"],
)
def test_a_release_fails_before_the_engine_is_paused(run_vllm, lines, processes, plugin):
    run_vllm(
        START + lines, VLLM_ENABLE_V1_MULTIPROCESSING=processes, MEMSAVER_VLLM=plugin, timeout=120
    )


def test_an_engine_with_only_vllms_allocator_can_be_released(run_vllm):
    run_vllm("""
from memsaver.integrations.vllm import SleepController
llm = LLM(enable_cumem_allocator=True)
first = llm.generate(PROMPTS)
control = SleepController(llm)
control.sleep()
assert not any(llm.collective_rpc(vllm_calls.resident)[0].values())
control.wake_up()
assert llm.generate(PROMPTS) == first
llm.shutdown()
    """)
