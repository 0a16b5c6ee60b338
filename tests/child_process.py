"""Python code in a child process: the environment that it gets, and how it must end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def environment_without(*prefixes: str) -> dict[str, str]:
    """This process's environment, less the variables whose names start so."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def run_code(
    code: str,
    environment: dict[str, str],
    folder: Path,
    *,
    status: int | None = 0,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter in that folder; an AssertionError at another exit status.

    With the status None, any is right. `timeout` is in seconds.
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
