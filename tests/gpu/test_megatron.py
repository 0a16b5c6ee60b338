"""Tests updates of a real SGLang engine from the shards of a Megatron trainer with two ranks.

    pytest -m "gpu and sglang" tests/gpu/test_megatron.py

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import GPU_SUPPORT
from test_rollout import SECONDS, go_through

CHILD = GPU_SUPPORT / "megatron_child.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.mark.parametrize("scene", ["one_gpu", pytest.param("two_gpus", marks=pytest.mark.two_gpus)])
def test_two_ranks_send_their_shards(scene: str, tmp_path: Path) -> None:
    go_through(scene, 2, tmp_path, CHILD)
