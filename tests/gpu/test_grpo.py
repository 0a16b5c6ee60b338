"""Tests examples/grpo with a real SGLang engine; results are bit-identical with and without sleep.

    pytest -m "gpu and sglang" tests/gpu/test_grpo.py

The tests use the installed memsaver package, including its entry points.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import program_runs
import pytest
from repository import GPU_SUPPORT, ROOT
from test_sglang import environment

EXAMPLE = ROOT / "examples" / "grpo"
SECONDS = 300  # for one run, including the compilation of kernels
STEPS = 6
OPTIONS = ["--model", "small", "--prompts", "16", "--samples", "8", "--memory-fraction", "0.4"]
GIB = 1 << 30

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(2 * SECONDS + 120),
]


def run(folder: Path, name: str, ranks: int, *options: str) -> dict[str, Any]:
    """Run `train.py` and return its results."""
    pytest.importorskip("transformers")
    launcher = program_runs.launcher(ranks) if ranks > 1 else []
    words = [*launcher, str(EXAMPLE / "train.py"), "--steps", str(STEPS), *OPTIONS]
    words += ["--verify", "full", "--out", str(folder / name), *options]
    program_runs.run(words, environment(name), folder, SECONDS)
    if importlib.util.find_spec("matplotlib") is not None:
        assert (folder / f"{name}.png").stat().st_size > 0
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.two_gpus)])
def test_a_run_is_the_same_with_and_without_sleep(tmp_path: Path, ranks: int) -> None:
    sleeping = run(tmp_path, "sleeping", ranks)
    plain = run(tmp_path, "plain", ranks, "--no-sleep")
    compared = subprocess.run(
        [sys.executable, str(EXAMPLE / "compare.py"), "sleeping.json", "plain.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert len(sleeping["steps"]) == STEPS
    assert len({step["answers"] for step in sleeping["steps"]}) == STEPS
    assert any(step["gradient"] for step in sleeping["steps"])
    # The engine's weights are the trainer's, in bfloat16.
    assert all(step["gap"] < 0.05 for step in sleeping["steps"]), sleeping["steps"]

    def peak(results: dict[str, Any], stage: str) -> float:
        return max(step["stages"][stage]["peak_bytes"] for step in results["steps"][1:])

    # The peaks exclude the first step, which begins with the engine awake. In later steps, the
    # engine's KV cache is released.
    assert peak(sleeping, "train") < peak(plain, "train") - 20 * GIB
    assert peak(sleeping, "update") < peak(plain, "update") - 20 * GIB


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="one engine"),
        pytest.param(["--ranks", "2", "--nodes", "2"], id="two nodes", marks=pytest.mark.two_gpus),
    ],
)
def test_the_ray_variant_runs(tmp_path: Path, words: list[str]) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("transformers")
    program = [str(EXAMPLE / "ray_workers.py"), "--steps", "2", "--preload", *words]
    if words:
        program.insert(0, str(GPU_SUPPORT / "ray_nodes.py"))
    done = subprocess.run(
        [sys.executable, *program],
        env=environment("ray"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "grpo-ray.json").read_text())
    assert len(found["steps"]) == 2 and all(step["gap"] < 0.05 for step in found["steps"])
