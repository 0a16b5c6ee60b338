"""Tests that a sleep or wake-up of a fake vLLM on several ranks changes all ranks or none."""

import pytest

START = """
llm = LLM(enable_sleep_mode=True, tensor_parallel_size=2)
first = llm.generate(PROMPTS)
states = lambda: [sorted(state["released"]) for state in llm.collective_rpc("memsaver_state")]
def fails(call, *words):
    with raising(Exception) as caught:
        call()
    assert all(word in str(caught.error) for word in words), caught.error
BOTH = ["kv_cache", "weights"]
"""
END = """
assert llm.generate(PROMPTS) == first
llm.sleep()
llm.wake_up()
assert llm.generate(PROMPTS) == first
llm.shutdown()
"""


@pytest.fixture
def run_ranks(run_vllm):
    """Run lines with a two-rank engine; at the end, the engine's calls must match its responses."""

    def run(lines: str, **env):
        return run_vllm(START + lines + END, **env)

    return run


def test_each_rank_reports_the_memory_in_use_after_a_full_release(run_ranks):
    run_ranks(
        """
from memsaver.integrations.engine.held import PARTS
from memsaver.integrations.vllm import SleepController
controller = SleepController(llm)
report = controller.sleep()
ranks = report.steps[-1].ranks
assert [rank.rank for rank in ranks] == [0, 1]
for rank in ranks:
    assert set(rank.held) == set(PARTS) - {"context"} and rank.held["tags"] == 0 < rank.held["rest"]
assert report.held["rest"] == sum(rank.held["rest"] for rank in ranks)
assert controller.wake_up().held == {}
        """
    )


def test_a_wake_up_without_memory_on_one_rank_wakes_none(run_ranks):
    run_ranks(
        """
for rank in (0, 1):
    llm.sleep()
    llm.collective_rpc(vllm_calls.occupy, args=((1 << 40) - (8 << 20), rank))
    fails(lambda: llm.wake_up(["weights"]), f"failed on rank {rank} of 2", "released as before")
    assert states() == [BOTH, BOTH]
    assert llm.llm_engine.is_sleeping()
    llm.collective_rpc(vllm_calls.occupy, args=(0, rank))
    llm.wake_up(["weights"])
    assert states() == [["kv_cache"]] * 2
    llm.wake_up(["kv_cache"])
    assert llm.generate(PROMPTS) == first
        """,
        MEMSAVER_SIM_MEMORY=1 << 40,
    )


def test_a_sleep_without_host_memory_on_one_rank_releases_none(run_ranks):
    run_ranks(
        """
llm.collective_rpc(vllm_calls.limit_host, args=(1 << 16, 0))
fails(llm.sleep, "failed on rank 0 of 2", "every rank has its memory; contents of kv_cache are")
assert states() == [[], []]
assert llm.generate(PROMPTS) == first
llm.collective_rpc(vllm_calls.limit_host, args=((1 << 64) - 1, 0))
        """
    )


def test_a_sleep_that_fails_leaves_tags_released_that_were_released_before(run_ranks):
    run_ranks(
        """
llm.collective_rpc("memsaver_release", args=(["kv_cache"], 1))
assert states() == [["kv_cache"]] * 2
llm.collective_rpc(vllm_calls.limit_host, args=(1 << 16, 0))
fails(llm.sleep, "failed on rank 0 of 2", "every rank has its memory")
assert states() == [["kv_cache"]] * 2
llm.wake_up(["kv_cache"])
assert llm.generate(PROMPTS) == first
llm.collective_rpc(vllm_calls.limit_host, args=((1 << 64) - 1, 0))
        """,
        VLLM_FAKE_VERSION="0.33.0",
    )


def test_a_failure_after_the_wake_up_on_one_rank_wakes_none(run_ranks):
    """At level 2, the next wake-up uses the worker's copies of the model's buffers."""
    run_ranks(
        """
for level, rank in ((1, 0), (1, 1), (2, 0), (2, 1)):
    llm.sleep(level=level)
    llm.collective_rpc(vllm_calls.break_next, args=("post_kv_cache_wake_up", rank))
    fails(llm.wake_up, "post_kv_cache_wake_up is broken", "released as before")
    assert states() == [BOTH, BOTH]
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    assert llm.generate(PROMPTS) == first
        """
    )


def test_a_failure_before_the_sleep_on_one_rank_releases_none(run_ranks):
    run_ranks(
        """
for rank in (0, 1):
    llm.collective_rpc(vllm_calls.break_next, args=("named_buffers", rank))
    fails(lambda: llm.sleep(level=2), "named_buffers is broken", "every rank has its memory")
    assert states() == [[], []]
    assert llm.generate(PROMPTS) == first
        """
    )


def test_a_sleep_that_cannot_be_undone_counts_as_done(run_ranks):
    """Otherwise, the engine would use memory that a rank lacks."""
    run_ranks(
        """
llm.collective_rpc(vllm_calls.fail_after_sleep, args=(0,))
llm.sleep()
assert states() == [BOTH, []]
failure = llm.collective_rpc("memsaver_state")[0]["last"]["failure"]
assert "Memory usage increased" in failure["message"] and "counts as asleep" in failure["message"]
assert llm.llm_engine.is_sleeping()
llm.collective_rpc(vllm_calls.occupy, args=(0, 0))
llm.wake_up()
assert states() == [[], []]
        """
    )


def test_a_controller_wakes_an_engine_whose_sleep_could_not_be_undone_on_any_rank(run_ranks):
    run_ranks(
        """
from memsaver.integrations.vllm import SleepController
controller = SleepController(llm)
for rank in (0, 1):
    llm.collective_rpc(vllm_calls.fail_after_sleep, args=(rank,))
    fails(controller.sleep, f"failed on rank {rank} of 2", "counts as asleep")
    assert sorted(map(len, states())) == [0, 2], states()
    assert controller.released >= set(BOTH), controller.released
    fails(controller.sleep, "still have the memory", "wake the engine up first")
    llm.collective_rpc(vllm_calls.occupy, args=(0, rank))
    controller.wake_up()
    assert states() == [[], []] and not controller.released
    assert llm.generate(PROMPTS) == first
        """
    )


def test_a_call_of_the_workers_outlasts_its_timeout(run_ranks):
    """Otherwise, vLLM's executor would leave the late responses in its queues."""
    run_ranks(
        """
fields = dict(name="g", address="127.0.0.1", port=1, backend="gloo", world_size=3, rank_offset=1)
rows = llm.collective_rpc("memsaver_join_group", timeout=0.01, args=(fields, 0.5))
assert len(rows) == 2 and all(check["failure"] for row in rows for check in row), rows
assert llm.generate(PROMPTS) == first
        """
    )


@pytest.mark.each_python
@pytest.mark.parametrize("first", [0, 2], ids=["data parallel", "external launcher"])
def test_an_executor_in_a_larger_world_has_a_group_of_its_own_ranks(run_vllm, first):
    """The world consists of two executors with two ranks each; only one executor sleeps.

    vLLM numbers the workers of each data-parallel engine from 0, but an external launcher's workers
    have the ranks of the world.
    """
    run_vllm(
        f"""
import multiprocessing, os, tempfile
from vllm_calls import join_world
context = multiprocessing.get_context("fork")
with tempfile.TemporaryDirectory() as folder:
    results = context.Queue()
    store = os.path.join(folder, "store")
    ranks = [
        context.Process(target=join_world, args=(store, rank, results, {first}))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    seen = dict(results.get(timeout=50) for _ in ranks)
    for process in ranks:
        process.join(50)
assert seen == {{0: None, 1: None, 2: [0, 1], 3: [0, 1]}}, seen
        """,
    )
