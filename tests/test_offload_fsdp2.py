"""FSDP2 trainers in tags, on one rank and on two that share nothing but gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_process import environment_without

pytest.importorskip("torch")

RANK = Path(__file__).with_name("fsdp2_rank.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_between_pauses_are_bit_equal(tmp_path, ranks):
    environment = {
        **environment_without("MEMSAVER_"),
        "MEMSAVER_DRIVER": "sim",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(tmp_path / "store"), str(rank), str(ranks)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    assert all("held" in text for text in said)
