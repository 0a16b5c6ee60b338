"""Test FSDP2 trainers in tags, on one rank and on two ranks that communicate only through gloo."""

import os
import sys

import pytest
from child_process import environment_without, run_together
from repository import IMPORT_PATH, SUPPORT

pytest.importorskip("torch")

RANK = SUPPORT / "fsdp2_rank.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_between_pauses_are_bit_equal(tmp_path, ranks):
    environment = {
        **environment_without("MEMSAVER_"),
        "MEMSAVER_DRIVER": "sim",
        "PYTHONPATH": os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(RANK), str(tmp_path / "store")]
    each = [[*command, str(rank), str(ranks)] for rank in range(ranks)]
    said = run_together([(words, environment) for words in each], timeout=100)
    assert all("held" in text for text in said)
