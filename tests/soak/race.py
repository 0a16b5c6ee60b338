"""Runs two walks concurrently, from a common start to a common end, and reports their results."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repository import IMPORT_PATH

import memsaver

MIB = 1 << 20
PATIENCE = 300  # seconds for an answer, in addition to the time of a walk

# The allowed growth of a process's figures between start and end. None for the figures of memsaver
# and the walk; for the process's memory, allocators' caches; for the device, the driver's own
# memory.
SLACK = {
    "sim": {"process_bytes": 48 * MIB},
    "gpu": {
        "process_bytes": 256 * MIB,
        "descriptors": 8,
        "threads": 4,
        "torch_bytes": 4 * MIB,
        "free_bytes": 64 * MIB,
    },
}


class Failed(AssertionError):
    """Raised if a process of the soak test failed, exited or hung."""


class Walker:
    """One of the two processes."""

    def __init__(self, command: list[str], env: dict[str, str], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # a tool that watches the process may print as well
                self._lines.put(line)
        self._lines.put(None)

    def tell(self, words: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(words + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer or its end gives the reason

    def answer(self, seconds: float = PATIENCE) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._process.send_signal(signal.SIGABRT)  # prints the stacks of its threads
            self._process.wait(PATIENCE)
            raise Failed(f"no answer in {seconds:.0f} s\n{self._last_words()}") from None
        if line is None:
            status = self._process.wait(PATIENCE)
            raise Failed(f"it ended, status {status}\n{self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise Failed(f"{found['failed']}\n{self._last_words()}")
        return found

    def end(self) -> int:
        self.tell("end")
        return self._process.wait(PATIENCE)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _last_words(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]


def run(
    driver: str,
    seconds: float,
    seed: int,
    *,
    steps: int = 1 << 60,
    gib: float | None = None,
    under: Sequence[str] = (),
    patience: float = PATIENCE,
) -> dict[str, Any]:
    """Run two walks of `seconds` seconds on one device; return their results. Raises Failed.

    Args:
        driver: the source of memory, either "gpu" for torch or "sim" for the simulated driver.
        seconds: the duration of the walks, without preparation and final checks.
        seed: the random seed. Runs with the same seed try the same steps, whose results depend on
            timing.
        steps: the maximum number of steps per process, for a run with the same steps on any
            machine.
        gib: device memory per process, in GiB; None for an amount that does not fit on the device
            twice.
        under: a command to run each process under, such as compute-sanitizer.
        patience: seconds to wait for an answer, in addition to the duration of the walks.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMSAVER_")
        and name not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    root = Path(memsaver.__file__).resolve().parent.parent
    env["PYTHONPATH"] = os.pathsep.join([IMPORT_PATH, str(root), env.get("PYTHONPATH", "")])
    env["PYTHONFAULTHANDLER"] = "1"
    if driver == "sim":
        env["MEMSAVER_DRIVER"] = "sim"
        env["MEMSAVER_SIM_MEMORY"] = "1GiB"
    with tempfile.TemporaryDirectory(prefix="memsaver-soak-") as folder:
        walkers = []
        try:
            for number in range(2):
                command = [*under, sys.executable, "-m", "soak.worker", driver]
                command += [str(2 * seed + number), folder, *([str(gib)] if gib else [])]
                walkers.append(Walker(command, env, Path(folder, f"errors.{number}")))
            return _race(walkers, driver, seconds, seed, steps, patience)
        finally:
            for walker in walkers:
                walker.kill()


def _race(
    walkers: list[Walker], driver: str, seconds: float, seed: int, steps: int, patience: float
) -> dict[str, Any]:
    def ask(words: str, more: float = 0) -> list[dict[str, Any]]:
        for walker in walkers:
            walker.tell(words)
        return [walker.answer(patience + more) for walker in walkers]

    ready = [walker.answer(patience) for walker in walkers]
    ask("figures")  # both release unused memory, before both are measured
    start = [row["figures"] for row in ask("figures")]
    begun = time.monotonic()
    ask(f"walk {seconds} {steps}", seconds)
    walked = time.monotonic() - begun
    done = ask("finish")
    ask("figures")
    end = [row["figures"] for row in ask("figures")]
    statuses = [walker.end() for walker in walkers]
    return {
        "driver": driver,
        "device": ready[0]["device"],
        "memsaver": ready[0]["version"],
        "seconds": round(walked, 1),
        "seed": seed,
        "processes": len(walkers),
        "limits": ready[0]["limits"],
        **{
            name: sum(row[name] for row in done)
            for name in ("cycles", "device_bytes", "copied_bytes", "fingerprinted_bytes")
        },
        **{
            name: dict(sum((Counter(row[name]) for row in done), Counter()))
            for name in ("operations", "errors_met", "errors_recovered", "warnings")
        },
        "start": start,
        "end": end,
        "statuses": statuses,
    }


def left(found: dict[str, Any]) -> list[str]:
    """Return the resources that the processes use at the end but did not use at the start."""
    slack = SLACK[found["driver"]]
    more = []
    for number, (start, end) in enumerate(zip(found["start"], found["end"], strict=True)):
        for name, before in start.items():
            grown = before - end[name] if name == "free_bytes" else end[name] - before
            if grown > slack.get(name, 0):
                more.append(f"process {number}: {name} {before} -> {end[name]}")
    return more


def check(found: dict[str, Any]) -> None:
    """Check the results of a race. Raises AssertionError."""
    assert found["statuses"] == [0] * found["processes"], found["statuses"]
    assert found["cycles"] > 0 and found["device_bytes"] > 0 and found["copied_bytes"] > 0
    assert found["errors_met"] == found["errors_recovered"]
    more = left(found)
    assert not more, more
