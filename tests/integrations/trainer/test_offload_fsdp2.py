"""Tests FSDP2 trainers in tags, on one rank and on two ranks that communicate only through gloo."""

import pytest
import rank_processes


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_between_pauses_are_bit_equal(tmp_path, ranks):
    rank_processes.run("import fsdp2_rank\nfsdp2_rank.main()\n", ranks, tmp_path, timeout=100)
