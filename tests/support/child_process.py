"""Runs Python code in a child process and checks its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def environment_without(*prefixes: str) -> dict[str, str]:
    """Return this process's environment without the variables whose names start with a prefix."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def reads_at_start(variables: Iterable[str]) -> bool:
    """Return whether an interpreter or its libraries read any of the variables at startup.

    PYTHONPATH is excluded because a forked process adopts its value.
    """
    read = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ")
    return any(name.startswith(read) and name != "PYTHONPATH" for name in variables)


def run_code(
    code: str,
    environment: dict[str, str],
    folder: Path,
    *,
    status: int | None = 0,
    timeout: float = 60,
    with_torch: bool = False,
    with_memsaver: bool = False,
    fresh: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run code in a new process in a folder; raise AssertionError if the exit status is not
    `status`.

    `status=None` accepts any exit status. `timeout` is in seconds. By default, the process is a new
    interpreter. With `with_torch`, the process is forked from one that has already imported torch,
    which saves seconds. With `with_memsaver`, the parent has imported both torch and memsaver, in
    an environment without memsaver's variables. If `fresh` is false, the parent has imported
    modules of the standard library, which saves a tenth of a second. Variables for which
    `reads_at_start` is true require a new interpreter.
    """
    __tracebackhide__ = True  # the failure is in the code, and logs must not show the environment
    code = textwrap.dedent(code)
    if with_torch or with_memsaver or not fresh:
        from rank_processes import run_forked

        modules = "memsaver" if with_memsaver else "torch" if with_torch else "plain"
        done = run_forked(code, environment, folder, modules=modules, timeout=timeout)
    else:
        done = subprocess.run(
            [sys.executable, "-c", code],
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
    """Run the commands concurrently, each in its own environment, and return their outputs.

    Raises AssertionError with all outputs if an exit status is not 0. All processes have ended when
    the call returns.
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
