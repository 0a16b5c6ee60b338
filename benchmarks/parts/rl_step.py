"""Measure the time and memory of each stage of RL steps with an engine and a trainer on one GPU.

rl_engine.py describes a step. The libraries use the GPU one after the other. For each library, an
engine and a trainer run, with the trainer's weights and optimizer states backed up. The first step
with each library creates the trainer and is not counted. In the other steps, all backups already
exist. As in a real training loop, stages follow each other immediately, except that the engine's
sleep begins after a wait.

All of the trainer's contents are compared after each wake-up, and the engine's weights are compared
using the engine's own checksum. Because the seeds are the same, the engine's weights after each
update are also compared between the libraries. A library that loses contents gets no rows.

The peer is measured with its default settings in SGLang, and once more with its option to retain
host memory. With this option, there is a row only for the total duration of the transitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comparison
import host_memory
import results
from children import Failed
from engine_process import say
from libraries import DEFAULT, OURS, PEERS, RETAINED
from rl_engine import TRANSITIONS, WORK
from sglang_engine import running

BENCH = "rl_cycle"
WORKER = "rl_engine:Loop"
STEP_SECONDS = 300  # the limit for a step; the peer's takes a minute
GIB = 1 << 30

TOTAL, PEAK = "rl_transition_seconds", "rl_peak_GiB"


@dataclass
class Found:
    """Measurements for one library.

    Attributes:
        seconds: the duration of each stage in each step.
        peaks: the GPU's peak memory use in each stage of each step, in GiB.
        weights: the checksum of the engine's weights after each update.
        failed: the reason why the measurement ended early, or "".
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    failed: str = ""

    def add(self, reply: Mapping[str, Any]) -> None:
        """Add the result of a step."""
        for stage, spent in reply["seconds"].items():
            self.seconds.setdefault(stage, []).append(spent)
        for stage, most in reply["peaks"].items():
            self.peaks.setdefault(stage, []).append(round(most / GIB, 3))
        self.weights.append(reply["weights"])

    @property
    def totals(self) -> list[float]:
        """Return the total duration of the transitions in each step, in seconds."""
        each = [self.seconds.get(name, []) for name in TRANSITIONS]
        return [round(sum(step), 4) for step in zip(*each, strict=True)]

    @property
    def highest(self) -> list[float]:
        """Return the highest peak of each step, in GiB."""
        return [max(step) for step in zip(*self.peaks.values(), strict=True)]


def measure_one(name: str, options: argparse.Namespace, failures: list[str]) -> Found:
    """Measure one library's steps until a failure; return no values if contents were lost."""
    found = Found()
    try:
        with running(
            WORKER,
            name,
            options,
            fraction=options.fraction,
            backup=options.engine_backup,
            states=options.states,
            bucket_bytes=options.bucket_mib << 20,
        ) as (child, _):
            for seed in range(options.steps + 1):
                reply = child.ask("step", within=STEP_SECONDS, seed=seed)
                stages = ", ".join(f"{key} {value:.2f}" for key, value in reply["seconds"].items())
                say(f"{name}: step {seed}: {stages}")
                if reply["lost"]:
                    found = Found()
                    raise Failed(f"{name}, step {seed}: lost {reply['lost']}")
                if reply["unchecked"] and not seed:
                    failures.append(
                        f"{name}: the engine's contents were not compared: {reply['unchecked']}"
                    )
                if seed:
                    found.add(reply)
    except Failed as error:
        failures.append(str(error))
        found.failed = str(error)
    return found


def rows(ours: Found, theirs: Found | None) -> Iterator[dict[str, Any]]:
    """Yield the rows for TOTAL and PEAK, and then one row for each measured stage."""
    if not ours.totals:
        return
    values = {
        TOTAL: (ours.totals, theirs.totals if theirs else []),
        PEAK: (ours.highest, theirs.highest if theirs else []),
    }
    for stage in (*TRANSITIONS, *WORK):
        mine, others = (milliseconds(one, stage) for one in (ours, theirs))
        values[f"rl_{stage}_ms"] = mine, others
    for metric, (mine, others) in values.items():
        if theirs is None:
            comparison.show(metric, mine)
            continue
        row = compared(metric, mine, DEFAULT, others, theirs.failed)
        if metric == PEAK:
            row["detail"] |= {"memsaver_stages": ours.peaks, "peer_stages": theirs.peaks}
        yield row


def milliseconds(found: Found | None, stage: str) -> list[float]:
    """Return the duration of a stage in each step."""
    return [round(spent * 1e3, 1) for spent in found.seconds.get(stage, [])] if found else []


def retained_row(ours: Found, theirs: Found) -> dict[str, Any]:
    """Return the row for TOTAL, compared with the peer that retains host memory."""
    row = compared(TOTAL, ours.totals, RETAINED, theirs.totals, theirs.failed)
    row["detail"]["peer_stages"] = theirs.seconds
    return row


def compared(
    metric: str, ours: Sequence[float], peer: str, theirs: Sequence[float], why: str
) -> dict[str, Any]:
    """Return a row, noting whether the peer ended early."""
    if not theirs:
        return results.unanswered(metric, ours, PEERS[peer], why, bench=BENCH)
    row = results.measurement(metric, ours, PEERS[peer], theirs, bench=BENCH)
    if why:
        row["detail"]["peer_failed"] = why
    return row


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for rl_*, except rl_kv_tokens_* and rl_step_overhead_seconds."""
    end = time.monotonic() + options.step_seconds
    if options.touch_gib:
        say(host_memory.touch_elsewhere(int(options.touch_gib * host_memory.GIB)))
    ours = measure_one(OURS, options, failures)
    theirs = peer_of(ours, DEFAULT, options, failures) if options.peer else None
    yield from rows(ours, theirs)
    if theirs is None or not ours.totals:
        return
    if time.monotonic() > end:
        failures.append(f"{PEERS[RETAINED]}: no time to measure it; increase --step-seconds")
        return
    yield retained_row(ours, peer_of(ours, RETAINED, options, failures))


def peer_of(ours: Found, name: str, options: argparse.Namespace, failures: list[str]) -> Found:
    """Measure a peer's steps; its engine must have the same weights as memsaver's engine."""
    theirs = measure_one(name, options, failures)
    pairs = zip(ours.weights, theirs.weights, strict=False)
    if any(mine and other and mine != other for mine, other in pairs):
        failures.append(f"the engine's weights of {name} differ after the same steps of training")
    return theirs
