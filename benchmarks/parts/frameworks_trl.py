"""Measure steps of TRL's GRPOTrainer with a colocated vLLM that sleeps while the model trains.

After each generation, TRL puts the engine to sleep at level 2. Later, TRL wakes the weights'
memory, sends new weights, and wakes the KV cache. The same training runs once with memsaver and
once with vLLM's own allocator, in two consecutive processes. The losses, rewards, gradients and
responses of each step must be identical. If they differ, the training with the peer runs a second
time. The measurements are still used if the peer's two runs also differ from each other, and if
memsaver's values of NUMBERS differ from the peer's by at most `training_differences.FACTOR` times
the difference between the peer's runs. Otherwise, no row is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comparison
import framework_model
import results
import runs
import training_differences
from children import Failed
from engine_process import START_SECONDS, process, say, wait_until_free
from libraries import OURS
from vllm_engine import PEER, THEIRS, environment

BENCH = "frameworks"
WORKER = "trl_worker:GrpoWorker"
STEP_SECONDS = 60  # limit for a step
NUMBERS = ("loss", "reward", "grad_norm")
COMPARED = (*NUMBERS, "responses")
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Found:
    """One training run.

    Attributes:
        steps: the values of COMPARED and the "seconds" of each step.
        cycles: the seconds of each sleep and of the wake-ups that follow the sleep.
        calls: the name and the seconds of each sleep and wake-up, in order.
        peak: the peak of the GPU's memory use, in MiB.
    """

    steps: list[dict[str, Any]]
    cycles: list[float]
    calls: list[tuple[str, float]]
    peak: float

    @property
    def seconds(self) -> list[float]:
        """Return the duration of each step except the first, which compiles kernels."""
        return [step["seconds"] for step in self.steps[1:]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("trl").add_argument
    add("--trl-steps", type=runs.at_least(2), default=5, help="number of training steps")
    add("--trl-fraction", type=float, default=0.3, help="vllm_gpu_memory_utilization")
    add("--trl-attention", default="TRITON_ATTN", help="vLLM's attention backend")
    add(
        "--trl-profile",
        action="store_true",
        help="print Python's profile of the first sleep and wake-ups; no rows are written",
    )


def cycles_of(calls: Sequence[tuple[str, float]]) -> list[float]:
    """Return the seconds of each sleep and its wake-ups; omit a final sleep without wake-ups."""
    found: list[float] = []
    woken = True
    for name, seconds in calls:
        if name == "sleep":
            if not woken:
                raise Failed("TRL put the engine to sleep twice without waking it")
            found.append(0.0)
        elif not found:
            raise Failed(f"TRL's first call of the engine was {name}")
        woken = name != "sleep"
        found[-1] += seconds
    return [round(total, 6) for total in (found if woken else found[:-1])]


def differences(one: Found, other: Found) -> list[str]:
    """Describe the values that differ between two runs, such as "step 2: loss 1.0, 1.1"."""
    return [
        f"step {number}: {key} {mine[key]}, {others[key]}"
        for number, (mine, others) in enumerate(zip(one.steps, other.steps, strict=True), 1)
        for key in COMPARED
        if mine[key] != others[key]
    ]


def train(name: str, options: argparse.Namespace) -> Found:
    """Train once with an allocator. Raises Failed."""
    wait_until_free(options.idle_mib)
    say(f"{name}: training with TRL")
    with process(
        WORKER,
        name,
        {**environment(name), **ENVIRONMENT},
        options,
        fraction=options.trl_fraction,
        steps=options.trl_steps,
        attention=options.trl_attention,
        profile=options.trl_profile,
    ) as child:
        child.ask("ready", within=START_SECONDS)
        reply = child.ask("train", within=START_SECONDS + STEP_SECONDS * options.trl_steps)
    for profile in reply["profiles"]:
        print(f"{name}, {profile}", file=sys.stderr)
    calls = [(str(call), float(seconds)) for call, seconds in reply["calls"]]
    found = Found(reply["steps"], cycles_of(calls), calls, reply["peak_MiB"])
    say(f"{name}: started in {reply['start']} s; cycles {found.cycles}; steps {found.seconds}")
    say(f"{name}: losses {[step['loss'] for step in found.steps]}")
    return found


def rows(ours: Found, theirs: Found, differing: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for two training runs."""
    values: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
        "trl_sleep_wake_seconds": (ours.cycles[:1], theirs.cycles[:1]),
        "trl_sleep_wake_later_seconds": (ours.cycles[1:], theirs.cycles[1:]),
        "trl_step_seconds": (ours.seconds, theirs.seconds),
        "trl_peak_MiB": ([ours.peak], [theirs.peak]),
    }
    for metric, (mine, others) in values.items():
        row = results.measurement(metric, mine, PEER, others, bench=BENCH)
        if "sleep_wake" in metric:
            row["detail"] |= {"memsaver_calls": ours.calls, "peer_calls": theirs.calls}
        if metric == "trl_step_seconds":
            row["detail"] |= {
                "losses": [step["loss"] for step in ours.steps],
                "rewards": [step["reward"] for step in ours.steps],
                "differences": list(differing),
            }
        yield row


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for trl_*."""
    framework_model.save(options)
    ours = train(OURS, options)
    if not options.peer:
        comparison.show("trl_sleep_wake_seconds", ours.cycles)
        comparison.show("trl_step_seconds", ours.seconds)
        return
    theirs = train(THEIRS, options)
    if options.trl_profile:
        return
    differing = differences(ours, theirs)
    if differing:
        say(f"the training runs differ: {differing}; {PEER} trains once more")
        again = train(THEIRS, options)
        if not differences(theirs, again):
            failures.append(f"trl: two runs of the peer agree, memsaver differs: {differing}")
            return
        steps = (ours.steps, theirs.steps, again.steps)
        if larger := training_differences.larger(*steps, NUMBERS):
            failures.append(f"trl: {'; '.join(larger)}")
            return
    yield from rows(ours, theirs, differing)
