"""Tests memsaver in a real vLLM engine: every sleep and wake-up preserves the greedy output.

For each engine, a child process (vllm_child.py) starts the engine once and runs the scenarios of
vllm_cycles, vllm_failures and vllm_asleep on it, one per test. After a failure, a new child process
starts.

    pytest -m "gpu and vllm"                     all tests, some of which need two GPUs
    pytest -m "gpu and vllm and not two_gpus"

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import engine_children
import pytest
from engine_children import TEST_SECONDS, Children, each
from repository import GPU_SUPPORT, TESTS

CHILD = GPU_SUPPORT / "vllm_child.py"
LONG_SECONDS = 150  # of a scenario with many cycles

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(TEST_SECONDS)]

CYCLES = [
    "vllm_cycles.memsaver_is_active",
    "vllm_cycles.level_1",
    "vllm_cycles.runtime_state",
    "vllm_cycles.weights_first",
    "vllm_cycles.kv_cache_first",
    "vllm_cycles.level_2",
    "vllm_cycles.level_2_kv_cache_first",
]
CALLS = [
    "vllm_cycles.repeated_calls",
    "vllm_cycles.level_0",
    "vllm_cycles.fifty_cycles",
    "vllm_failures.a_wake_without_memory",
    "vllm_failures.requests_are_aborted",
    "vllm_failures.requests_end_first",
    "vllm_failures.requests_continue",
    "vllm_cycles.unknown_tags_and_levels",
]
POOL = [
    "vllm_failures.out_of_memory_in_the_pool",
    "vllm_failures.exceptions_in_the_pool",
    "vllm_failures.freed_while_asleep",
    "vllm_failures.later_allocations_are_saved",
]
WAKE = [
    "vllm_asleep.requests_wake",
    "vllm_asleep.requests_that_cannot_wake",
    "vllm_asleep.requests_never_wake_lost_weights",
    "vllm_asleep.an_idle_engine_sleeps",
]
REFUSED = ["vllm_asleep.requests_are_refused", "vllm_asleep.direct_calls"]
KILLED = "vllm_failures.a_killed_worker"  # the last scenario of an engine

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
ENVIRONMENTS = {
    "wake": {
        "MEMSAVER_VLLM_ASLEEP": "wake",
        "MEMSAVER_VLLM_ASLEEP_WAIT": "4",
        "MEMSAVER_VLLM_SLEEP_AFTER": "3",
    },
    "v1": V1,
    "quantized_v1": V1,
    "in_process": {
        **V1,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "MEMSAVER_VLLM_GRAPHS": "1",
    },
    **{place: {"MEMSAVER_VLLM_BACKUP": place} for place in ("pageable", "disk", "peer")},
    "graphs_tp2": {"MEMSAVER_VLLM_GRAPHS": "1"},
    "adapters": {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # By default, vLLM's LoRA kernels add parts of a sum in an order that varies.
        "VLLM_BATCH_INVARIANT": "1",
    },
    "ray": {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
}


def environment(group: str) -> dict[str, str]:
    """Return the environment of a child process."""
    env = engine_children.environment(("VLLM_PLUGINS",))
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    # Ray's workers need vllm_in_worker, and servers need vllm_server_arguments.
    paths = (env["PYTHONPATH"], str(CHILD.parent), str(TESTS / "support"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return defaults | env | ENVIRONMENTS.get(group, {})


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    made = Children(CHILD, tmp_path_factory.mktemp("vllm"), environment)
    yield made
    made.close()


@each([*CYCLES, *CALLS, *REFUSED, KILLED])
def test_an_engine_in_its_own_process(children: Children, name: str) -> None:
    children.run("engine", name)


@each(
    [
        *CYCLES,
        *POOL,
        "vllm_failures.a_wake_without_memory",
        "vllm_failures.requests_continue",
        *REFUSED,
        "vllm_failures.a_second_engine",
    ]
)
def test_an_engine_in_the_process_with_the_v1_runner(children: Children, name: str) -> None:
    """The test uses torch's expandable segments and pausable graphs."""
    children.run("in_process", name)


@each([*CYCLES, *REFUSED])
def test_an_engine_in_its_own_process_with_the_v1_runner(children: Children, name: str) -> None:
    children.run("v1", name)


@each(CYCLES)
def test_weights_and_kv_cache_in_fp8(children: Children, name: str) -> None:
    children.run("quantized", name)


@each(CYCLES)
def test_weights_and_kv_cache_in_fp8_with_the_v1_runner(children: Children, name: str) -> None:
    """The V1 runner resets the scales of the KV cache, which are in the weights' memory."""
    children.run("quantized_v1", name)


@each([*CYCLES, "vllm_cycles.drafts_are_accepted", *REFUSED])
def test_a_draft_model(children: Children, name: str) -> None:
    """The draft has the target's weights, so the engine accepts the draft's tokens."""
    children.run("draft", name)


def test_the_memory_does_not_grow_over_1000_cycles(children: Children) -> None:
    children.run("cycles", "vllm_cycles.thousand_cycles", LONG_SECONDS)


@each([*CYCLES, *REFUSED])
def test_a_worker_of_ray(children: Children, name: str) -> None:
    pytest.importorskip("ray")
    children.run("ray", name)


@each(
    [
        "vllm_cycles.memsaver_is_active",
        "vllm_cycles.adapters",
        "vllm_cycles.adapters_at_level_2",
        *REFUSED,
    ]
)
def test_adapters(children: Children, name: str) -> None:
    """The test uses torch's expandable segments and the V2 runner."""
    children.run("adapters", name)


@each(WAKE)
def test_requests_that_wake_an_engine(children: Children, name: str) -> None:
    children.run("wake", name)


@each(["vllm_cycles.level_1", "vllm_cycles.weights_first"])
@pytest.mark.parametrize(
    "place", ["pageable", "disk", pytest.param("peer", marks=pytest.mark.two_gpus)]
)
def test_other_places_of_backups(children: Children, place: str, name: str) -> None:
    children.run(place, name)


@pytest.mark.two_gpus
@each([*CYCLES, *CALLS, *REFUSED, KILLED])
def test_tensor_parallel(children: Children, name: str) -> None:
    children.run("engine_tp2", name)


@pytest.mark.two_gpus
@each(CYCLES)
def test_tensor_parallel_with_pausable_graphs(children: Children, name: str) -> None:
    """vLLM's custom all-reduce is disabled because it exports the graphs' memory."""
    children.run("graphs_tp2", name)
