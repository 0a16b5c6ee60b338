"""Test rollouts of a real vLLM engine: sleep, verified updates and pauses, on one GPU.

    pytest -m "gpu and vllm" tests/gpu/test_vllm_rollout.py

The tests use the memsaver that is installed for this Python, with its entry points.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from test_vllm import environment

CHILD = Path(__file__).with_name("vllm_rollout_child.py")
SECONDS = 360  # including the compilation of kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.mark.parametrize("scene", ["launched", "quantized", "group", "llm"])
def test_a_rollout_engine(scene: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, str(CHILD), scene, str(tmp_path)],
            env=environment("rollout"),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    text = log.read_text(errors="replace")
    tail = "\n".join(line[:500] for line in text.splitlines()[-80:])
    assert child.returncode == 0 and "held" in text.splitlines(), tail
