"""Tests a trainer of transformers' models whose optimizer, weights and reference model sleep.

Each case of transformers_cases runs in one process per rank.

    pytest -m gpu tests/gpu/test_transformers.py
    pytest -m recipes tests/gpu/test_transformers.py    on the simulated driver
"""

from __future__ import annotations

import socket
import sys

import pytest
from child_process import run_together
from installed import needs
from repository import GPU_SUPPORT
from torch_environment import torch_environment

CASES = GPU_SUPPORT / "transformers_cases.py"
NEEDED = {
    "trainer": "accelerate",
    "trainer_again": "accelerate",
    "fsdp2": "transformers",
    "deepspeed_zero3": "deepspeed",
}
TIMEOUT = 300

pytestmark = pytest.mark.timeout(TIMEOUT + 30)


def run(name: str, ranks: int = 1, **more: str) -> None:
    """Run a case on `ranks` ranks; if the case fails, fail with the ranks' output."""
    needs("transformers", "pip install transformers")
    needs(NEEDED[name], f"pip install {NEEDED[name]}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    env = {**torch_environment(expandable=False), "HF_HUB_OFFLINE": "1", **more}
    each = [env]
    if not name.startswith("trainer"):  # without these variables, Trainer uses one GPU
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        each = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    commands = [([sys.executable, str(CASES), name], one) for one in each]
    said = run_together(commands, timeout=TIMEOUT)
    assert all(text.splitlines()[-1] == "held" for text in said), "\n".join(said)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NEEDED)
def test_steps_with_sleeps_are_equal(name: str) -> None:
    run(name)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero3"])
def test_steps_with_sleeps_are_equal_on_two_ranks(name: str) -> None:
    run(name, ranks=2)


@pytest.mark.recipes
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("trainer", 1),
        ("trainer_again", 1),
        ("fsdp2", 1),
        ("fsdp2", 2),
        ("deepspeed_zero3", 1),
        ("deepspeed_zero3", 2),
    ],
)
def test_steps_with_sleeps_are_equal_on_the_simulated_driver(name: str, ranks: int) -> None:
    run(name, ranks, MEMSAVER_DRIVER="sim", DS_ACCELERATOR="cpu")
