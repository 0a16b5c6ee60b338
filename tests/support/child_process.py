"""Runs Python code in a child process, and checks its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path


def environment_without(*prefixes: str) -> dict[str, str]:
    """Return this process's environment without the variables whose names start with a prefix."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def run_code(
    code: str,
    environment: dict[str, str],
    folder: Path,
    *,
    status: int | None = 0,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in that folder; raise AssertionError for another exit status.

    The status None accepts any status. `timeout` is in seconds.
    """
    __tracebackhide__ = True  # what failed is the code; and the environment is not for a log
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if status is not None:
        assert done.returncode == status, done.stdout + done.stderr
    return done


def run_together(
    commands: Sequence[tuple[Sequence[str], dict[str, str]]], *, timeout: float = 60
) -> list[str]:
    """What processes that run at once print, each a command and its environment.

    An AssertionError with all of it where one does not exit with 0. None outlives the call.
    """
    processes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, environment in commands
    ]
    said = []
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said
