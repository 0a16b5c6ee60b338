"""Tests wake-ups of a vLLM engine by tag, in any order."""

import pytest

START = """
llm = LLM("calibrated", enable_sleep_mode=True)
first = llm.generate(PROMPTS)
"""


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_tags_wake_up_in_any_order(run_vllm, version):
    """Restored buffers wait for the weights, and calibrated scales of the KV cache are
    preserved.
    """
    run_vllm(
        f"""
{START}
for tags in (["weights", "kv_cache"], ["kv_cache", "weights"]):
    for level in (1, 1, 2, 2):
        llm.sleep(level=level)
        for tag in tags:
            llm.wake_up([tag])
        if level == 2:
            llm.collective_rpc("reload_weights")
        assert llm.generate(PROMPTS) == first, (tags, level)
        """,
        VLLM_FAKE_VERSION=version,
    )


def test_a_sleep_between_the_tags_loses_no_buffers(run_vllm):
    run_vllm(
        f"""
{START}
llm.sleep(level=2)
llm.wake_up(["kv_cache"])
llm.llm_engine.model_executor.discard(("kv_cache",))
llm.wake_up(["weights"])
llm.collective_rpc("reload_weights")
llm.wake_up(["kv_cache"])
assert llm.generate(PROMPTS) == first
        """,
        VLLM_FAKE_VERSION="0.33.0",
    )
