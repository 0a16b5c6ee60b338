"""Replacements for `Popen` that fork a process with loaded modules instead of starting Python."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import rank_processes
from child_process import reads_at_start
from repository import SUPPORT

_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class WarmPopen(subprocess.Popen[Any]):
    """A `Popen` that runs Python scripts in forks of a process that has imported torch.

    A fork saves the seconds that an import of torch takes. Other commands run as usual. Scripts
    with preloaded libraries also run as usual, because libraries can be preloaded only when a
    process starts.
    """

    modules = "torch"

    def described(self, command: list[str], environment: dict[str, str]) -> dict[str, Any] | None:
        """Return the script and its arguments, or None for a command that runs as usual."""
        is_script = command[:1] == [sys.executable] and command[1].endswith(".py")
        if not is_script or "LD_PRELOAD" in environment:
            return None
        return {"script": command[1], "arguments": command[2:]}

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(_usual).bind(self, *given).arguments
        command = list(map(str, call["args"])) if isinstance(call["args"], list) else []
        environment = dict(os.environ if call["env"] is None else call["env"])
        described = self.described(command, environment)
        if described is None:
            _usual(self, *given)
            return

        def file(name: str, own: int) -> str:
            return f"/proc/{os.getpid()}/fd/{own if call[name] == -1 else call[name]}"

        self.pid = rank_processes.adopted(
            {
                **described,
                "folder": str(call["cwd"] or os.getcwd()),
                "environment": environment,
                "input": file("p2cread", 0),
                "output": file("c2pwrite", 1),
                "errors": file("errwrite", 2),
                "session": call["start_new_session"],
            },
            self.modules,
        )
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[end] for end in ends))  # type: ignore[attr-defined]


class CommandPopen(WarmPopen):
    """A `Popen` that runs `python -m memsaver` in forks of a process that has imported typer.

    The class does not support output to a pipe that nobody reads, because the pipe cannot be
    reopened.
    """

    modules = "command line"

    def described(self, command: list[str], environment: dict[str, str]) -> dict[str, Any] | None:
        """Return the command line's script, or None for a command that runs as usual."""
        if command[:3] != [sys.executable, "-m", "memsaver"]:
            return None
        encoding = environment.pop("PYTHONIOENCODING", None)
        if reads_at_start(dict(environment.items() - os.environ.items())):
            return None
        script = str(SUPPORT / "console_script.py")
        return {"script": script, "arguments": command[3:], "encoding": encoding}


def run_command(command: list[str], **named: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with a CommandPopen."""
    with mock.patch.object(subprocess, "Popen", CommandPopen):
        return subprocess.run(command, **named)  # the caller decides about the status
