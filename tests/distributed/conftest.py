"""A fixture that runs code on the ranks of a group: `run_ranks(code, 3)`."""

import functools

import distributed_ranks
import pytest


@pytest.fixture
def run_ranks(tmp_path):
    return functools.partial(distributed_ranks.run, tmp_path)
