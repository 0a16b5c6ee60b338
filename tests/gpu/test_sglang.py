"""Tests memsaver in a real SGLang engine: every release and resume preserves the greedy output.

For each engine, a child process (sglang_child.py) starts the engine once and runs scenarios on it,
one per test. The scenarios are in the modules sglang_cycles, sglang_calls, sglang_asleep,
sglang_held and sglang_updates. After a failure, a new child process starts. Each test function has
its own engine, so test functions can run concurrently on different GPUs, selected by
CUDA_VISIBLE_DEVICES.

    pytest -m "gpu and sglang"                     all tests, some of which need two GPUs
    pytest -m "gpu and sglang and not two_gpus"

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

from collections.abc import Iterator

import engine_children
import pytest
from engine_children import TEST_SECONDS, Children, each
from repository import GPU_SUPPORT

CHILD = GPU_SUPPORT / "sglang_child.py"

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(TEST_SECONDS)]

CYCLES = [
    "sglang_cycles.active_in_every_process",
    "sglang_cycles.two_stages",
    "sglang_cycles.weights_alone",
    "sglang_cycles.graphs_too",
    "sglang_cycles.little_stays",
    "sglang_cycles.five_cycles_with_a_trainer",
    "sglang_cycles.a_wake_that_does_not_fit",
]
CALLS = [
    "sglang_calls.calls_past_the_controller",
    "sglang_calls.a_release_under_a_request",
    "sglang_calls.a_sleep_that_aborts",
    "sglang_calls.a_sleep_that_waits",
]
UPDATES = [
    "sglang_updates.weights_are_gone_without_an_update",
    "sglang_updates.update_from_gpu_tensors",
    "sglang_updates.update_from_host_tensors",
    "sglang_updates.update_from_buckets",
]
HTTP = [
    "sglang_calls.http_calls",
    "sglang_calls.http_resume_that_does_not_fit",
    "sglang_asleep.http_requests_are_refused",
    "sglang_updates.disk_updates_that_fail",
]
HTTP_UPDATES = ["sglang_updates.http_updates_that_fail"]
ASLEEP = [
    "sglang_asleep.requests_are_refused",
    "sglang_asleep.the_scheduler_refuses_too",
    "sglang_updates.disk_updates_that_fail",
    "sglang_updates.plain_updates_that_fail",
]
WAKE = [
    "sglang_asleep.requests_wake",
    "sglang_asleep.incomplete_weights_are_not_read",
    "sglang_asleep.a_wake_without_memory",
    "sglang_asleep.an_idle_engine_sleeps",
]
WAIT = ["sglang_held.requests_wait"]
AT_ONCE = ["sglang_asleep.wakes_and_releases_at_once"]
HELD = [
    "sglang_held.held_requests_keep_their_order",
    "sglang_held.held_requests_are_aborted",
    "sglang_asleep.unknown_requests_are_refused",
]
REPLICAS = [
    *CYCLES[:-1],
    "sglang_cycles.a_wake_that_does_not_fit_one_replica",
    *ASLEEP[:-1],  # SGLang does not send tensors to replicas
]


def environment(group: str) -> dict[str, str]:
    """Return the environment of a child process."""
    env = engine_children.environment(("TMS_", "SGLANG_PLUGINS", "SGLANG_PLATFORM"))
    env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    env.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    return env


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    made = Children(CHILD, tmp_path_factory.mktemp("sglang"), environment)
    yield made
    made.close()


@each(CYCLES + CALLS + ASLEEP)
def test_with_a_backup(children: Children, name: str) -> None:
    children.run("backup", name)


@each(UPDATES)
def test_scenarios_without_a_backup(children: Children, name: str) -> None:
    children.run("no_backup", name)


@each(CYCLES + HTTP + HTTP_UPDATES)
def test_scenarios_on_a_server(children: Children, name: str) -> None:
    children.run("server", name)


@each([*WAIT, *HELD])
def test_asleep_wait(children: Children, name: str) -> None:
    children.run("backup_wait", name)


@each(WAIT)
def test_asleep_wait_server(children: Children, name: str) -> None:
    children.run("server_wait", name)


@each(WAKE)
def test_asleep_wake(children: Children, name: str) -> None:
    children.run("backup_wake", name)


@each([*WAKE, *AT_ONCE])
def test_asleep_wake_server(children: Children, name: str) -> None:
    children.run("server_wake", name)


@each(["sglang_asleep.embeddings_while_asleep"])
def test_asleep_embeddings(children: Children, name: str) -> None:
    children.run("embedding", name)


@each(["sglang_asleep.adapters_while_asleep"])
def test_asleep_adapters(children: Children, name: str) -> None:
    children.run("lora", name)


@each(["sglang_asleep.two_models_take_turns"])
def test_two_servers_take_turns(children: Children, name: str) -> None:
    children.run("server_turns", name)


@each(["sglang_cycles.two_stages", "sglang_cycles.graphs_too"])
@pytest.mark.parametrize("place", ["pageable", "disk"])
def test_other_places_of_backups(children: Children, place: str, name: str) -> None:
    children.run(f"backup_{place}", name)


@pytest.mark.two_gpus
@each(["sglang_updates.update_from_another_gpu"])
def test_an_update_from_another_gpu(children: Children, name: str) -> None:
    children.run("no_backup", name)


@pytest.mark.two_gpus
@each(CYCLES + CALLS + ASLEEP)
def test_tensor_parallel(children: Children, name: str) -> None:
    children.run("backup_tp2", name)


@pytest.mark.two_gpus
@each(UPDATES)
def test_tensor_parallel_without_a_backup(children: Children, name: str) -> None:
    children.run("no_backup_tp2", name)


@pytest.mark.two_gpus
@each(REPLICAS)
def test_scenarios_on_data_parallel_replicas(children: Children, name: str) -> None:
    children.run("backup_dp2", name)


ON_TWO_GPUS = {
    "backup_pp2": ASLEEP,
    "backup_wait_tp2": WAIT,
    "backup_wait_pp2": WAIT,
    "backup_wait_dp2": WAIT,
    "backup_wake_tp2": WAKE,
    "backup_wake_pp2": WAKE,
    "backup_wake_dp2": WAKE,
    "backup_dp_attention": [*CYCLES[:2], *ASLEEP],
    "backup_wait_dp_attention": WAIT,
    "backup_wake_dp_attention": WAKE,
    "server_tp2": [CYCLES[1], *HTTP, *HTTP_UPDATES],
    "server_pp2": [CYCLES[1], *HTTP, *HTTP_UPDATES],
    "server_dp2": [CYCLES[1], *HTTP],
    **{f"server_wait_{kind}": WAIT for kind in ("tp2", "pp2", "dp2")},
    **{f"server_wake_{kind}": [*WAKE, *AT_ONCE] for kind in ("tp2", "pp2", "dp2")},
}


@pytest.mark.two_gpus
@pytest.mark.parametrize(
    "group, name", [(group, name) for group, names in ON_TWO_GPUS.items() for name in names]
)
def test_asleep_on_two_gpus(children: Children, group: str, name: str) -> None:
    children.run(group, name)
