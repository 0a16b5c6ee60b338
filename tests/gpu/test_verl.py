"""Tests generations on verl's own SGLang server while the server sleeps, under each policy.

    pytest -m "gpu and sglang" tests/gpu/test_verl.py

The tests require verl 0.9 and Ray. They use the installed memsaver package, including its entry
points.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from program_runs import run
from repository import GPU_SUPPORT
from test_rollout import SECONDS
from test_sglang import environment

CHILD = GPU_SUPPORT / "verl_child.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.two_gpus)])
def test_a_sleeping_server_refuses_holds_or_wakes_up_for_requests(
    gpus: int, tmp_path: Path
) -> None:
    words = [str(CHILD), str(gpus), str(tmp_path)]
    assert "held" in run(words, environment("verl"), tmp_path, SECONDS).splitlines()
