"""Test memsaver in a real SGLang engine: every release and resume keeps the greedy output.

For each engine, a child process (sglang_child.py) starts the engine once and runs the scenarios of
the modules sglang_cycles, sglang_calls, sglang_asleep and sglang_updates on it, one per test. After
a failure, a new child is started. Each test function has its own engine, so test functions can run
concurrently on different GPUs, selected by CUDA_VISIBLE_DEVICES.

    pytest -m "gpu and sglang"                     all tests, some of which need two GPUs
    pytest -m "gpu and sglang and not two_gpus"

The tests use the memsaver that is installed for this Python, with its entry points.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

CHILD = Path(__file__).with_name("sglang_child.py")

START_SECONDS = 240  # including the compilation of kernels
SCENARIO_SECONDS = 100
END_SECONDS = 60

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(START_SECONDS + SCENARIO_SECONDS + 2 * END_SECONDS),
]

CYCLES = [
    "sglang_cycles.active_in_every_process",
    "sglang_cycles.two_stages",
    "sglang_cycles.weights_alone",
    "sglang_cycles.graphs_too",
    "sglang_cycles.little_stays",
    "sglang_cycles.five_cycles_with_a_trainer",
    "sglang_cycles.a_wake_that_does_not_fit",
]
CALLS = [
    "sglang_calls.calls_past_the_controller",
    "sglang_calls.a_release_under_a_request",
    "sglang_calls.a_sleep_that_aborts",
    "sglang_calls.a_sleep_that_waits",
]
UPDATES = [
    "sglang_updates.weights_are_gone_without_an_update",
    "sglang_updates.update_from_gpu_tensors",
    "sglang_updates.update_from_host_tensors",
    "sglang_updates.update_from_buckets",
]
HTTP = [
    "sglang_calls.http_calls",
    "sglang_calls.http_resume_that_does_not_fit",
    "sglang_asleep.http_requests_are_refused",
]
ASLEEP = [
    "sglang_asleep.requests_are_refused",
    "sglang_asleep.the_scheduler_refuses_too",
    "sglang_asleep.plain_updates_that_fail",
]
WAKE = [
    "sglang_asleep.requests_wake",
    "sglang_asleep.a_wake_without_memory",
    "sglang_asleep.an_idle_engine_sleeps",
]
REPLICAS = [
    *CYCLES[:-1],
    "sglang_cycles.a_wake_that_does_not_fit_one_replica",
    "sglang_asleep.requests_are_refused",
    "sglang_asleep.the_scheduler_refuses_too",
]


def environment() -> dict[str, str]:
    """Return a child's environment: no settings for memsaver or torch's allocator; SGLang's own."""
    dropped = ("MEMSAVER_", "TMS_", "SGLANG_PLUGINS", "SGLANG_PLATFORM")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped)
        and name not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    # The source tree's memsaver lacks the integrations; the child must import the installed one.
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if Path(path).resolve() != ROOT)
    env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    env.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    env["HF_HUB_OFFLINE"] = env["TRANSFORMERS_OFFLINE"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    return env


class Child:
    """A process group with one engine in it."""

    def __init__(self, group: str, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "log"
        self.start_error = ""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD), group, str(folder)],
                env=environment(),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.start_error = self._reply("the start", START_SECONDS)

    def run(self, scenario: str) -> str:
        """Run a scenario; return the reason if it failed, otherwise ""."""
        stdin = self._process.stdin
        assert stdin
        with contextlib.suppress(BrokenPipeError):
            stdin.write(scenario.encode() + b"\n")
            stdin.flush()
        return self._reply(scenario, SCENARIO_SECONDS)

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
        """End the engine and all its remaining processes."""
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
    """Keeps one child at a time, for the most recent group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._group = ""
        self._child: Child | None = None
        self._broken: set[str] = set()  # groups whose engine does not start
        self._started = 0

    def run(self, group: str, scenario: str) -> None:
        """Run a scenario on an engine of the group; fail with its reason if it fails."""
        if group in self._broken:
            pytest.fail("the engine did not start, as its first test says", pytrace=False)
        if self._child is None or group != self._group:
            self.close()
            self._started += 1
            self._group = group
            self._child = Child(group, self._folder / f"{group}-{self._started}")
            if self._child.start_error:
                reason = self._child.start_error
                self._broken.add(group)
                self.close()
                pytest.fail(f"the engine did not start:\n{reason}", pytrace=False)
        reason = self._child.run(scenario)
        if reason:
            self.close()
            pytest.fail(reason, pytrace=False)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    made = Children(tmp_path_factory.mktemp("sglang"))
    yield made
    made.close()


def each(scenarios: list[str]) -> Any:
    return pytest.mark.parametrize("name", scenarios, ids=lambda name: name.partition(".")[2])


@each(CYCLES + CALLS + ASLEEP)
def test_with_a_backup(children: Children, name: str) -> None:
    children.run("backup", name)


@each(UPDATES)
def test_scenarios_without_a_backup(children: Children, name: str) -> None:
    children.run("no_backup", name)


@each(CYCLES + HTTP)
def test_scenarios_on_a_server(children: Children, name: str) -> None:
    children.run("server", name)


@each(["sglang_asleep.requests_wait"])
def test_asleep_wait(children: Children, name: str) -> None:
    children.run("backup_wait", name)


@each(["sglang_asleep.requests_wait"])
def test_asleep_wait_server(children: Children, name: str) -> None:
    children.run("server_wait", name)


@each(WAKE)
def test_asleep_wake(children: Children, name: str) -> None:
    children.run("backup_wake", name)


@each([*WAKE, "sglang_asleep.wakes_and_releases_at_once"])
def test_asleep_wake_server(children: Children, name: str) -> None:
    children.run("server_wake", name)


@pytest.mark.two_gpus
@each(CYCLES + CALLS + ASLEEP)
def test_tensor_parallel(children: Children, name: str) -> None:
    children.run("backup_tp2", name)


@pytest.mark.two_gpus
@each(UPDATES)
def test_tensor_parallel_without_a_backup(children: Children, name: str) -> None:
    children.run("no_backup_tp2", name)


@pytest.mark.two_gpus
@each(REPLICAS)
def test_scenarios_on_data_parallel_replicas(children: Children, name: str) -> None:
    children.run("backup_dp2", name)
