"""Tests that a dead SGLang engine is restarted and leaves no GPU memory allocated.

    pytest -m "gpu and sglang" tests/gpu/test_restarts.py

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import GPU_SUPPORT
from test_rollout import SECONDS, go_through

CHILD = GPU_SUPPORT / "restart_child.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.mark.parametrize("scene", ["deaths", "session", "in_place"])
def test_an_engine_that_died_is_started_again(scene: str, tmp_path: Path) -> None:
    go_through(scene, 1, tmp_path, CHILD)
