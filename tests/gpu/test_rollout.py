"""Tests rollouts of a real SGLang engine: output compared with SGLang's own, sleep and failures.

    pytest -m "gpu and sglang" tests/gpu/test_rollout.py

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from program_runs import run_ranks
from repository import GPU_SUPPORT
from test_sglang import environment

CHILD = GPU_SUPPORT / "rollout_child.py"
POLICIES = GPU_SUPPORT / "rollout_policies_child.py"
SECONDS = 420  # including the compilation of kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
]


def go_through(scene: str, size: int, folder: Path, child: Path = CHILD) -> None:
    """Run a scenario of the program `child` on `size` ranks."""
    outputs = run_ranks([str(child), scene, str(folder)], environment(scene), folder, SECONDS, size)
    assert all("held" in output.splitlines() for output in outputs), outputs


def test_an_engine_of_one_process(tmp_path: Path) -> None:
    go_through("alone", 1, tmp_path)


def test_a_server_gives_sglangs_own_output(tmp_path: Path) -> None:
    go_through("served", 1, tmp_path)


def test_two_engines_of_one_process_have_their_own_policies(tmp_path: Path) -> None:
    go_through("one_rank", 1, tmp_path, POLICIES)


@pytest.mark.two_gpus
def test_an_engine_that_two_ranks_share(tmp_path: Path) -> None:
    go_through("two", 2, tmp_path)


@pytest.mark.two_gpus
@pytest.mark.parametrize("scene", ["two_ranks", "two_stages", "two_replicas"])
def test_the_policies_of_an_engine_that_two_ranks_share(scene: str, tmp_path: Path) -> None:
    go_through(scene, 2, tmp_path, POLICIES)
