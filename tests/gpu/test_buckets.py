"""Tests buckets and regions that two ranks share, without an engine.

    pytest -m gpu tests/gpu/test_buckets.py

The tests use the installed memsaver package.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_children import environment
from program_runs import run_ranks
from repository import GPU_SUPPORT

CHILD = GPU_SUPPORT / "buckets_child.py"
SECONDS = 100


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    "scene",
    [
        "one_gpu",
        pytest.param("two_gpus", marks=pytest.mark.two_gpus),
        pytest.param("own_gpu", marks=pytest.mark.two_gpus),
    ],
)
def test_two_ranks_write_into_each_others_buckets(scene: str, tmp_path: Path) -> None:
    check(scene, tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 20)
def test_a_rank_maps_the_tensors_of_the_other_ranks_region(tmp_path: Path) -> None:
    check("region", tmp_path)


def check(scene: str, tmp_path: Path) -> None:
    outputs = run_ranks([str(CHILD), scene], environment(()), tmp_path, SECONDS, 2)
    assert all("held" in output.splitlines() for output in outputs), outputs
