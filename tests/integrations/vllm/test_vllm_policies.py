"""Test that each vLLM engine has its own policy for requests, with the fake vLLM."""


def test_each_engine_keeps_the_policy_of_its_start(asleep):
    asleep(
        """
import os
os.environ.update(MEMSAVER_VLLM_ASLEEP="wait", MEMSAVER_VLLM_ASLEEP_WAIT="0.1")
async with engine_of() as second:
    os.environ["MEMSAVER_VLLM_ASLEEP"] = "refuse"
    for one, when in ((engine, "wake"), (second, "wait")):
        [state] = await one.collective_rpc("memsaver_state")
        assert state["when_asleep"] == when
        await one.sleep()
    assert await generate(engine)
    assert "no caller woke it up within 0.1 s" in str(await refusal(generate(second)))
""",
        when="wake",
    )


def test_an_llm_keeps_the_policy_of_its_start(run_vllm):
    """Also its worker, which is in the same process."""
    run_vllm(
        """
import os
llm = LLM(enable_sleep_mode=True)
os.environ["MEMSAVER_VLLM_ASLEEP"] = "refuse"
[state] = llm.collective_rpc("memsaver_state")
assert state["when_asleep"] == "wake"
llm.sleep()
assert llm.generate(PROMPTS)
llm.shutdown()
""",
        MEMSAVER_VLLM_ASLEEP="wake",
    )


def test_each_engine_has_the_policy_of_its_launch(run_vllm):
    run_vllm(
        """
import os, time
from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RolloutEngine
def launched(**policy):
    return RolloutEngine.launch(
        kind="vllm", timeout=60, model="tiny", distributed_executor_backend="uni", **policy
    )
def generated(engine):
    return engine.generate([[1, 2]], {"max_tokens": 4}).token_ids.tolist()
for wrong in ({"asleep": "sleep"}, {"sleep_after": 1}, {"asleep": "wake", "sleep_after": "1"}):
    refused(ConfigError, lambda: launched(**wrong))
environment = dict(os.environ)
with launched(asleep="wake", sleep_after=1) as first, launched(asleep_wait=0.1) as second:
    assert os.environ == environment
    first_output = generated(first)
    end = time.monotonic() + 30
    while first.refresh() is not Status.ASLEEP:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert generated(first) == first_output
    second.sleep()
    error = refused(EngineAsleepError, lambda: generated(second))
    assert "no caller woke it up within 0.1 s" in str(error)
""",
        timeout=120,
        MEMSAVER_VLLM_ASLEEP="wait",
        VLLM_FAKE_START="fork",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
