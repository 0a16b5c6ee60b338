"""Runs Python programs until they exit, each in its own process group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """Return a TCP port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def launcher(ranks: int) -> list[str]:
    """Return the command-line prefix with which torch starts a program as several ranks."""
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*words, f"--master-port={free_port()}"]


def run(words: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float) -> str:
    """Run a program that must succeed; return its output.

    Args:
        words: the program and its arguments.
        env: the environment variables.
        folder: the working directory, in which the logs are also written.
        seconds: the time limit, after which the program is terminated and the test fails.
    """
    return _run(words, [env], folder, seconds)[0]


def run_ranks(
    words: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float, size: int
) -> list[str]:
    """Run a program as `size` ranks, all of which must succeed; return each rank's output.

    The other arguments are the same as for `run`.
    """
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    envs = [{**env, **world, "RANK": str(rank)} for rank in range(size)]
    return _run(words, envs, folder, seconds)


def _run(
    words: Sequence[str], envs: Sequence[Mapping[str, str]], folder: Path, seconds: float
) -> list[str]:
    """Run a program once for each environment; all runs must end with status 0."""
    logs = [folder / f"log-{number}" for number in range(len(envs))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for env, path in zip(envs, logs, strict=True):
            with path.open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        env=env,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outputs = [path.read_text(errors="replace") for path in logs]
    tails = "\n".join(
        "\n".join([f"--- {path.name}", *(line[:500] for line in output.splitlines()[-80:])])
        for path, output in zip(logs, outputs, strict=True)
    )
    assert [process.returncode for process in processes] == [0] * len(envs), tails
    print(*outputs, sep="\n")  # for pytest -rP
    return outputs
