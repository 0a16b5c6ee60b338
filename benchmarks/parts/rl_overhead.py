"""Measure the time that an RL step takes beyond its work: training, update and generation.

`benchmarks/rl_overhead.py` defines a complete step. The overhead is the step's duration minus the
duration of its work. The work is measured in steps whose stages begin and end with an idle device.
The engine's weights have no backup, because the update overwrites them. The peer retains host
memory, and runs its transitions one after the other. Each library's first step with an idle
device and its first complete step are not counted.

All losses, the engine's weights after each step and the trainer's memory at the end are compared.
Libraries whose contents differ get no row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import comparison
import host_memory
import results
from children import Failed
from engine_process import say
from libraries import OURS, PEERS, RETAINED
from rl_engine import WORK
from sglang_engine import running

BENCH, METRIC = "rl_cycle", "rl_step_overhead_seconds"
WORKER = "rl_overhead:Steps"
STEP_SECONDS = 300  # the limit for a step
LEAST = 0.001  # the minimum overhead in seconds, because noise could make it negative


@dataclass
class Found:
    """Measurements for one library.

    Attributes:
        work: the duration of each kind of work in each step with an idle device, in seconds.
        whole: the duration of each complete step, in seconds.
        calls: the duration on the host of each call in each complete step, in milliseconds.
        contents: the losses and checksums, in order.
    """

    work: dict[str, list[float]] = field(default_factory=dict)
    whole: list[float] = field(default_factory=list)
    calls: dict[str, list[float]] = field(default_factory=dict)
    contents: list[Any] = field(default_factory=list)

    @property
    def overheads(self) -> list[float]:
        """Return each complete step's overhead, its duration minus that of its work, in seconds."""
        work = sum(statistics.median(self.work[stage]) for stage in WORK)
        return [round(max(LEAST, seconds - work), 4) for seconds in self.whole]


def measure_one(name: str, options: argparse.Namespace) -> Found:
    """Measure one library. Raises Failed if the library loses contents or its run ends early."""
    found = Found()
    settings = {
        "fraction": options.fraction,
        "backup": False,
        "states": options.states,
        "bucket_bytes": options.bucket_mib << 20,
        "learned": options.train_tokens,
    }
    with running(WORKER, name, options, **settings) as (child, _):
        for seed in range(options.steps + 1):
            reply = child.ask("apart", within=STEP_SECONDS, seed=seed)
            if reply["lost"]:
                raise Failed(f"{name}, step {seed}: lost {reply['lost']}")
            found.contents.append(reply["loss"])
            for stage, spent in reply["work"].items():
                found.work.setdefault(stage, []).extend([spent] if seed else [])
        for seed in range(options.steps + 1, 2 * options.steps + 2):
            reply = child.ask("whole", within=STEP_SECONDS, seed=seed)
            say(f"{name}: whole step {seed}: {reply['seconds']:.2f} s, loss {reply['loss']:.6f}")
            say(f"{name}: ms of its calls: {reply['calls']}")
            found.contents += [reply["loss"], reply["weights"]]
            if seed > options.steps + 1:
                found.whole.append(reply["seconds"])
                for call, spent in reply["calls"].items():
                    found.calls.setdefault(call, []).append(spent)
        found.contents.append(child.ask("contents", within=STEP_SECONDS)["digest"])
    say(f"{name}: overheads {found.overheads}, work {found.work}")
    return found


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for METRIC."""
    start = time.monotonic()
    if options.touch_gib:
        say(host_memory.touch_elsewhere(int(options.touch_gib * host_memory.GIB)))
    ours = measure_one(OURS, options)
    if not options.peer:
        comparison.show(METRIC, ours.overheads)
        return
    theirs = measure_one(RETAINED, options)
    say(f"overhead: {time.monotonic() - start:.0f} s")
    if ours.contents != theirs.contents:
        failures.append(
            f"{METRIC}: losses or contents differ: {ours.contents} and {theirs.contents}"
        )
        return
    yield row(ours, theirs)


def row(ours: Found, theirs: Found) -> dict[str, Any]:
    """Return the row, with all durations."""
    made = results.measurement(
        METRIC, ours.overheads, PEERS[RETAINED], theirs.overheads, bench=BENCH
    )
    for who, found in (("memsaver", ours), ("peer", theirs)):
        made["detail"] |= {
            f"{who}_whole": found.whole,
            f"{who}_work": found.work,
            f"{who}_calls": found.calls,
        }
    return made
