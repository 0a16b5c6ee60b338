"""Tests rollouts of a real vLLM engine: sleep, verified updates and pauses.

    pytest -m "gpu and vllm" tests/gpu/test_rollout_vllm.py

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

import json
from pathlib import Path

import program_runs
import pytest
from repository import GPU_SUPPORT, ROOT
from test_vllm import environment

EXAMPLE = ROOT / "examples" / "grpo" / "train.py"
CHILD = GPU_SUPPORT / "vllm_rollout_child.py"
SECONDS = 360  # including the compilation of kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(SECONDS + 60),
]


def run(folder: Path, *words: str) -> str:
    """Run a program that must succeed; return its output."""
    env = environment("rollout") | {"VLLM_SERVER_DEV_MODE": "1"}
    return program_runs.run(words, env, folder, SECONDS)


SCENES = ["launched", "quantized", "adapters", "group", "llm", "async", "url"]


@pytest.mark.parametrize("scene", SCENES)
def test_a_rollout_engine(scene: str, tmp_path: Path) -> None:
    for package in ("uvicorn", "httpx") if scene == "url" else ():
        pytest.importorskip(package)
    assert "held" in run(tmp_path, str(CHILD), scene, str(tmp_path)).splitlines()


@pytest.mark.two_gpus
def test_an_engine_that_two_ranks_share(tmp_path: Path) -> None:
    said = run(tmp_path, *program_runs.launcher(2), str(CHILD), "two", str(tmp_path))
    assert said.splitlines().count("held") == 2


def test_the_grpo_example_trains_with_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--engine", "vllm", "--steps", "4", "--prompts", "16", "--samples", "8"]
    words += ["--memory-fraction", "0.3", "--verify", "full", "--no-picture", "--out", "run"]
    run(tmp_path, str(EXAMPLE), *words)
    steps = json.loads((tmp_path / "run.json").read_text())["steps"]
    assert len({step["answers"] for step in steps}) == 4
    assert any(step["gradient"] for step in steps)
    # The engine's weights are the trainer's, in bfloat16.
    assert all(step["gap"] < 0.05 for step in steps), steps
