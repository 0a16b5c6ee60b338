"""Tests verified weight updates of a real SGLang engine, its output afterwards, and bad updates.

    pytest -m "gpu and sglang" tests/gpu/test_weight_sync.py

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import GPU_SUPPORT
from test_rollout import SECONDS, go_through

CHILD = GPU_SUPPORT / "weight_sync_child.py"
ENGINES = GPU_SUPPORT / "weight_sync_engines.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.mark.parametrize(
    ("scene", "size"),
    [
        ("alone", 1),
        ("whole_process", 1),
        ("session", 1),
        ("group", 1),
        pytest.param("group_nccl", 1, marks=pytest.mark.two_gpus),
        pytest.param("two", 2, marks=pytest.mark.two_gpus),
    ],
)
def test_weights_reach_a_real_engine(scene: str, size: int, tmp_path: Path) -> None:
    go_through(scene, size, tmp_path, CHILD)


@pytest.mark.parametrize(
    ("scene", "size"),
    [
        ("engine_set", 1),
        ("one_gpu", 2),
        pytest.param("replicas", 2, marks=pytest.mark.two_gpus),
        pytest.param("stages", 2, marks=pytest.mark.two_gpus),
        pytest.param("nodes", 2, marks=pytest.mark.two_gpus),
        pytest.param("mesh", 2, marks=pytest.mark.two_gpus),
        pytest.param("mesh_nccl", 2, marks=pytest.mark.three_gpus),
    ],
)
def test_weights_reach_replicas_stages_and_several_engines(
    scene: str, size: int, tmp_path: Path
) -> None:
    go_through(scene, size, tmp_path, ENGINES)
