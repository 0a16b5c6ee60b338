"""Tests requests to a sleeping `AsyncLLM` and to the server around it.

    pytest -m "gpu and vllm" tests/gpu/test_vllm_requests.py

The tests use the installed memsaver package, including its entry points. The module test_vllm
contains the tests of requests to an `LLM`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from program_runs import run
from repository import GPU_SUPPORT
from test_vllm import environment

CHILD = GPU_SUPPORT / "vllm_asleep_child.py"
SECONDS = 280  # including the compilation of kernels
POLICIES = {
    "refuse": {},
    "wait": {"MEMSAVER_VLLM_ASLEEP": "wait", "MEMSAVER_VLLM_ASLEEP_WAIT": "6"},
    "wake": {
        "MEMSAVER_VLLM_ASLEEP": "wake",
        "MEMSAVER_VLLM_ASLEEP_WAIT": "2",
        "MEMSAVER_VLLM_SLEEP_AFTER": "4",
    },
    "openai": {},
    "level_2": {},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.mark.parametrize("scene", POLICIES)
def test_requests_to_a_sleeping_engine(scene: str, tmp_path: Path) -> None:
    check(scene, tmp_path)


@pytest.mark.two_gpus
@pytest.mark.parametrize("scene", ["wait", "wake"])
def test_requests_to_two_sleeping_ranks(scene: str, tmp_path: Path) -> None:
    check(scene, tmp_path, "2")


def check(scene: str, folder: Path, *ranks: str) -> None:
    env = environment(scene) | POLICIES[scene] | {"VLLM_SERVER_DEV_MODE": "1"}
    output = run([str(CHILD), scene, str(folder), *ranks], env, folder, SECONDS)
    assert "held" in output.splitlines(), output
