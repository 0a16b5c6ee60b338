"""Processes with one engine each, in which tests run scenarios."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

START_SECONDS = 240  # including the compilation of kernels
SCENARIO_SECONDS = 100
END_SECONDS = 60
TEST_SECONDS = START_SECONDS + SCENARIO_SECONDS + 2 * END_SECONDS  # the limit of one test


def environment(dropped: tuple[str, ...]) -> dict[str, str]:
    """Return the environment without memsaver's variables, torch's allocator settings, and
    `dropped`.

    Args:
        dropped: prefixes of further variables to remove.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEMSAVER_", *dropped))
        and name not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    # The source tree's memsaver lacks the integrations; the child must import the installed one.
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if Path(path).resolve() != ROOT)
    env["HF_HUB_OFFLINE"] = env["TRANSFORMERS_OFFLINE"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    return env


class Child:
    """A process group that contains one engine.

    Args:
        script: the program, whose arguments are GROUP and FOLDER; see `engine_serving`.
        group: the name of the engine's configuration.
        folder: a new folder for the engine's files and log.
        env: the environment variables.
    """

    def __init__(self, script: Path, group: str, folder: Path, env: Mapping[str, str]) -> None:
        folder.mkdir()
        self._log = folder / "log"
        self.start_error = ""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), group, str(folder)],
                env=env,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.start_error = self._reply("the start", START_SECONDS)

    def run(self, scenario: str, seconds: float) -> str:
        """Run a scenario. Return "" on success; if the scenario failed or timed out, return the
        reason.
        """
        stdin = self._process.stdin
        assert stdin
        with contextlib.suppress(BrokenPipeError):
            stdin.write(scenario.encode() + b"\n")
            stdin.flush()
        return self._reply(scenario, seconds)

    def _reply(self, what: str, seconds: float) -> str:
        stdout = self._process.stdout
        assert stdout
        if not select.select([stdout], [], [], seconds)[0]:
            return f"{what} did not end in {seconds:g} s\n{self._tail()}"
        line = stdout.readline()
        if not line:
            return f"the process ended in {what}, status {self._status()}\n{self._tail()}"
        reply: dict[str, Any] = json.loads(line)
        return "" if reply["ok"] else f"{reply['trace']}\n{self._tail()}"

    def _status(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(10)
        return None

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        shown = [line[:500] for line in lines if "server_args=" not in line][-80:]
        return "\n".join([f"--- the end of {self._log}", *shown])

    def close(self) -> None:
        """Terminate the engine and all its remaining processes."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        with contextlib.suppress(OSError):
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        stdout.close()
        # Killed processes release their GPU memory with a short delay.
        deadline = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)


class Children:
    """Keeps one child process at a time, for the group that a test used last.

    Args:
        script: the children's program; see `Child`.
        folder: the parent of the children's folders.
        env: a function that returns a child's environment for its group.
    """

    def __init__(self, script: Path, folder: Path, env: Callable[[str], Mapping[str, str]]) -> None:
        self._script, self._folder, self._env = script, folder, env
        self._group = ""
        self._child: Child | None = None
        self._broken: set[str] = set()  # groups whose engine does not start
        self._started = 0

    def run(self, group: str, scenario: str, seconds: float = SCENARIO_SECONDS) -> None:
        """Run a scenario on an engine of the group; if the scenario fails, fail the test with the
        reason.
        """
        if group in self._broken:
            pytest.fail("the engine did not start, as its first test says", pytrace=False)
        if self._child is None or group != self._group:
            self.close()
            self._started += 1
            self._group = group
            folder = self._folder / f"{group}-{self._started}"
            self._child = Child(self._script, group, folder, self._env(group))
            if self._child.start_error:
                reason = self._child.start_error
                self._broken.add(group)
                self.close()
                pytest.fail(f"the engine did not start:\n{reason}", pytrace=False)
        reason = self._child.run(scenario, seconds)
        if reason:
            self.close()
            pytest.fail(reason, pytrace=False)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def each(scenarios: list[str]) -> Any:
    """Run a test for each scenario, with the scenario's "module.function" as the argument
    `name`.
    """
    return pytest.mark.parametrize("name", scenarios, ids=lambda name: name.partition(".")[2])
