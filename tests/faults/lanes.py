"""Runs workers: processes with the simulated driver, os_faults preloaded, and a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from built_sources import LIBRARY, built
from repository import IMPORT_PATH, ROOT, TESTS

from faults.injections import Injection, injections_of

LIMIT_SECONDS = 60.0  # limit for a worker's answer, which takes milliseconds
SOURCE = TESTS / "native" / "os_faults.cpp"

# The system files that the library reads: two NUMA nodes and one cgroup on every machine.
_SYSTEM = {
    "sys/devices/system/node/online": "0-1",
    "sys/bus/pci/devices/0000:01:00.0/numa_node": "1",
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB",
    "proc/self/cgroup": "0::/job",
    "proc/self/mountinfo": "30 24 0:26 / /cg rw - cgroup2 cgroup2 rw",
    "cg/job/memory.max": str(48 << 30),
    "cg/job/memory.current": str(1 << 30),
    "cg/job/memory.stat": "inactive_file 4096\nactive_file 4096",
    "cg/job/cpu.max": "400000 100000",
}


class Workplace:
    """A folder for workers, with os_faults, fake system files, and a folder for backup files.

    Attributes:
        environment: the workers' environment variables.
        home: the folder that contains the package memsaver that the workers use.
    """

    def __init__(self, folder: Path, home: Path = ROOT) -> None:
        self.home = home
        compiler = os.environ.get("CXX", "g++").split()
        flags = (*LIBRARY, "-std=c++17", "-Wextra")
        self.interposer = built(
            "os_faults.so", [SOURCE], flags, compiler=compiler, libraries=["-ldl"]
        )
        (folder / "disk").mkdir()
        for name, text in _SYSTEM.items():
            path = folder / "system" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
        self.environment = {
            **kept,
            # After the caller's libraries, because a sanitizer's library must be the first.
            "LD_PRELOAD": ":".join(filter(None, [kept.get("LD_PRELOAD"), str(self.interposer)])),
            "PYTHONPATH": IMPORT_PATH,
            "MEMSAVER_DRIVER": "sim",
            "MEMSAVER_SIM_DEVICES": "2",
            "MEMSAVER_DISK_DIR": str(folder / "disk"),
            "MEMSAVER_TEST_SYSTEM_ROOT": str(folder / "system"),
            # The server makes its system calls once in a process, in the first act, and none of
            # them may fail an act: tests/inspection/test_stats_server.py tests their failures.
            "MEMSAVER_TOP": "off",
        }


class Worker:
    """A worker process for one scenario. Only one thread can use the worker."""

    def __init__(self, place: Workplace, scenario: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - for its life
        self._scenario = scenario
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.worker", scenario],
            env=place.environment,
            cwd=place.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._read = b""

    def ask(self, line: str) -> dict[str, Any]:
        """Send a request and return the answer; if no answer arrives, the result is "died" or
        "hung".
        """
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        end = time.monotonic() + LIMIT_SECONDS
        output = self._process.stdout.fileno()
        while b"\n" not in self._read:
            ready, _, _ = select.select([output], [], [], max(end - time.monotonic(), 0))
            if not ready:
                self._stop(signal.SIGABRT)  # prints its threads' stacks
                return {"result": "hung", "why": f"no answer in {LIMIT_SECONDS} s\n{self._said()}"}
            part = os.read(output, 1 << 16)
            if not part:
                status = self._process.wait()
                return {"result": "died", "why": f"the process ended: {status}\n{self._said()}"}
            self._read += part
        answer, self._read = self._read.split(b"\n", 1)
        found: dict[str, Any] = json.loads(answer)
        return found

    def counts(self) -> dict[str, int]:
        """Return the calls that the scenario's act makes. Raises RuntimeError if the act fails."""
        answer = self.ask("count")
        if "counts" not in answer:
            raise RuntimeError(
                f"{self._scenario} does not work without faults: {answer.get('why')}"
            )
        counts: dict[str, int] = answer["counts"]
        return counts

    def close(self) -> None:
        self._stop(signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _stop(self, number: int) -> None:
        for sent in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
                return

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]


def sweep(
    place: Workplace,
    scenario: str,
    injections: list[Injection] | None,
    chosen: Callable[[Injection], bool],
) -> tuple[str, list[tuple[Injection, str, str]]]:
    """Run faults of one scenario: the given faults, or a selection of the possible faults.

    Returns the scenario and, for each injection, the result and the reason for a failure. Raises
    RuntimeError if the act fails without a fault. The worker that counts the act's calls also runs
    the faults, because starting a worker takes as long as dozens of faults.
    """
    outcomes = []
    worker: Worker | None = Worker(place, scenario)
    try:
        if injections is None:
            injections = list(filter(chosen, injections_of(scenario, worker.counts())))
        for injection in injections:
            worker = worker or Worker(place, scenario)
            answer = worker.ask(str(injection))
            result = answer.get("result", "failed")
            outcomes.append((injection, result, answer.get("why", "")))
            if result not in ("passed", "unmet"):
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()
    return scenario, outcomes
