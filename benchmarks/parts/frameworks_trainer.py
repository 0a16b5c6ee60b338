"""Measure a transformers Trainer whose optimizer, weights and reference model sleep.

The same training runs three times: with memsaver's `offload`, with `Tensor.to` to the host and
back, and with everything resident on the device. If the losses or gradients of a run differ from
those of the resident run, the run fails and produces no rows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any

import comparison
import results
import runs
from engine_process import START_SECONDS, inherited_without, process, say, wait_until_free
from libraries import OURS
from trainer_worker import KEPT, MOVES, RESIDENT

BENCH = "frameworks"
WORKER = "trainer_worker:TrainerWorker"
STEP_SECONDS = 60  # limit for a step
DROPPED = ("LD_PRELOAD", "MEMSAVER_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
PEERS = {MOVES: "Tensor.to the host and back", RESIDENT: "everything on the device"}

Found = dict[str, Any]  # the result of TrainerWorker.train


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("trainer").add_argument
    add(
        "--trainer-steps",
        type=runs.at_least(2),
        default=5,
        help="number of training steps; the first is not measured",
    )


def train(name: str, options: argparse.Namespace) -> Found:
    """Train once. Raises Failed."""
    wait_until_free(options.idle_mib)
    environment = {**inherited_without(DROPPED, os.environ), **ENVIRONMENT}
    with process(WORKER, name, environment, options, steps=options.trainer_steps) as child:
        child.ask("ready", within=START_SECONDS)
        found = child.ask("train", within=START_SECONDS + STEP_SECONDS * options.trainer_steps)
    say(f"{name}: peak {found['peak_MiB']} MiB; {found['steps']}")
    return found


def column(found: Found, key: str) -> list[float]:
    """Return `key` of each step except the first, which creates the optimizer's states."""
    return [float(step[key]) for step in found["steps"][1:]]


def rows(found: Mapping[str, Found]) -> Iterator[dict[str, Any]]:
    """Yield the rows for three training runs."""
    ours, moves, resident = found[OURS], found[MOVES], found[RESIDENT]
    values = (
        ("trainer_transition_seconds", column(ours, "transitions"), MOVES, moves, "transitions"),
        ("trainer_step_seconds", column(ours, "seconds"), RESIDENT, resident, "seconds"),
        ("trainer_asleep_MiB", column(ours, "asleep_MiB"), RESIDENT, resident, "asleep_MiB"),
    )
    for metric, mine, peer, theirs, key in values:
        yield results.measurement(metric, mine, PEERS[peer], column(theirs, key), bench=BENCH)
    peaks = [ours["peak_MiB"]], PEERS[RESIDENT], [resident["peak_MiB"]]
    row = results.measurement("trainer_peak_MiB", *peaks, bench=BENCH)
    row["detail"] |= {"losses": [step["loss"] for step in ours["steps"]]}
    yield row


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for trainer_*."""
    names = (OURS, MOVES, RESIDENT) if options.peer else (OURS,)
    found = {name: train(name, options) for name in names}
    if not options.peer:
        comparison.show("trainer_transition_seconds", column(found[OURS], "transitions"))
        return
    expected = [[step[key] for key in KEPT] for step in found[RESIDENT]["steps"]]
    for name in (OURS, MOVES):
        seen = [[step[key] for key in KEPT] for step in found[name]["steps"]]
        if seen != expected:
            failures.append(f"trainer, {name}: {KEPT} {seen} differ from {expected}")
            return
    yield from rows(found)
