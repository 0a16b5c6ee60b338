"""FSDP2 trainers in tags, on one rank and on two that share nothing but gloo."""

import os
import sys
from pathlib import Path

import pytest
from child_process import environment_without, run_together

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
    command = [sys.executable, str(RANK), str(tmp_path / "store")]
    each = [[*command, str(rank), str(ranks)] for rank in range(ranks)]
    said = run_together([(words, environment) for words in each], timeout=100)
    assert all("held" in text for text in said)
