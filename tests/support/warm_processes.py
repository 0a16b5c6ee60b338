"""Processes that have imported torch, in place of new interpreters that run a script."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import rank_processes

_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class WarmPopen(subprocess.Popen[Any]):
    """A `Popen` that runs Python scripts in forks of a process that has imported torch.

    It saves the seconds that an import of torch takes. Other commands run as usual, and so do
    scripts with preloaded libraries, which a process gets only at its start.
    """

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(_usual).bind(self, *given).arguments
        command = list(map(str, call["args"])) if isinstance(call["args"], list) else []
        environment = dict(os.environ if call["env"] is None else call["env"])
        is_script = command[:1] == [sys.executable] and command[1].endswith(".py")
        if not is_script or "LD_PRELOAD" in environment:
            _usual(self, *given)
            return

        def file(name: str, own: int) -> str:
            return f"/proc/{os.getpid()}/fd/{own if call[name] == -1 else call[name]}"

        self.pid = rank_processes.adopted(
            {
                "script": command[1],
                "arguments": command[2:],
                "folder": str(call["cwd"] or os.getcwd()),
                "environment": environment,
                "input": file("p2cread", 0),
                "output": file("c2pwrite", 1),
                "errors": file("errwrite", 2),
                "session": call["start_new_session"],
            }
        )
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[end] for end in ends))  # type: ignore[attr-defined]
