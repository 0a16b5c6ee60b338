"""Test rollouts of a real SGLang engine: output compared with SGLang's own, sleep and failures.

    pytest -m "gpu and sglang" tests/gpu/test_rollout.py

The tests use the memsaver that is installed for this Python, with its entry points.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from test_sglang import environment

CHILD = Path(__file__).with_name("rollout_child.py")
SECONDS = 420  # including the compilation of kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
]


def go_through(scene: str, size: int, folder: Path, child: Path = CHILD) -> None:
    """Run a scene of the child as `size` ranks; all must end with status 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    env = {**environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks, logs = [], [folder / f"rank-{rank}" for rank in range(size)]
    try:
        for rank, path in enumerate(logs):
            with path.open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(child), scene, str(folder)],
                        env={**env, "RANK": str(rank), "WORLD_SIZE": str(size)},
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(SECONDS)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    said = [path.read_text(errors="replace") for path in logs]
    tails = "\n".join(
        "\n".join([f"--- rank {rank}", *(line[:500] for line in text.splitlines()[-60:])])
        for rank, text in enumerate(said)
    )
    assert [rank.returncode for rank in ranks] == [0] * size, tails
    assert all("held" in text.splitlines() for text in said), tails


def test_an_engine_of_one_process(tmp_path: Path) -> None:
    go_through("alone", 1, tmp_path)


def test_a_server_gives_sglangs_own_output(tmp_path: Path) -> None:
    go_through("served", 1, tmp_path)


@pytest.mark.two_gpus
def test_an_engine_that_two_ranks_share(tmp_path: Path) -> None:
    go_through("two", 2, tmp_path)
