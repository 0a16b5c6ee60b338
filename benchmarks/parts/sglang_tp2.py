"""Measure the memory that a sleeping SGLang engine uses with tensor parallelism on two GPUs.

The benchmark compares suspended NCCL communicators with communicators that keep their memory and
NCCL's default channels. MEMSAVER_SGLANG_SUSPEND_NCCL=1 suspends communicators and limits NCCL's
channels. The benchmark also compares the durations of resumes of all memory. Both comparisons are
repeated with NCCL_MAX_CTAS=8, which reduces NCCL's memory, and with NCCL_MAX_CTAS=64, which lets
NCCL choose. The memory in use is the larger of the two GPUs' values. Requires NCCL 2.29.7 or newer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import results
from children import Failed, attempt
from engine_process import begin, say, used_mib, wait_until_free
from libraries import OURS
from raw_driver import count_gpus
from sglang_engine import BENCH, engine_process

METRIC, RESUME = "sglang_resident_tp2_MiB", "sglang_resume_tp2_ms"
PEER = "memsaver, communicators not suspended"
WORKER = "parts.sglang_switch:Switching"
FRACTION = 0.75


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows; yield none on a machine with fewer than two GPUs."""
    if options.device != "cpu" and count_gpus() < 2:
        say(f"{METRIC} needs two GPUs")
        return
    for channels in (None, 8, 64):
        resident, resume, variables = METRIC, RESUME, {}
        if channels is not None:
            resident, resume = (
                f"sglang_{what}_tp2_{channels}_ctas_{unit}"
                for what, unit in (("resident", "MiB"), ("resume", "ms"))
            )
            variables = {"NCCL_MAX_CTAS": str(channels)}
        with attempt(failures):
            ours = measure_one(options, {**variables, "MEMSAVER_SGLANG_SUSPEND_NCCL": "1"})
            theirs = measure_one(options, {**variables, "MEMSAVER_SGLANG_SUSPEND_NCCL": "0"})
            used = [[max(gpus) for gpus in found.used] for found in (ours, theirs)]
            row = results.measurement(resident, used[0], PEER, used[1], bench=BENCH)
            for who, found in (("memsaver", ours), ("peer", theirs)):
                row["detail"] |= {f"{who}_gpus": found.used, f"{who}_held": found.held}
            yield row
            yield results.measurement(resume, ours.resumes, PEER, theirs.resumes, bench=BENCH)


@dataclass
class Found:
    """Measurements of one engine, one for each cycle.

    Attributes:
        used: the memory in use on each GPU while all tags are released, in MiB.
        held: the memory that the release reports as still in use, in bytes by owner.
        resumes: the duration of a resume of all tags, in ms.
    """

    used: list[list[float]] = field(default_factory=list)
    held: list[dict[str, int]] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)


def measure_one(options: argparse.Namespace, variables: dict[str, str]) -> Found:
    """Release and resume an engine with environment variables. Raises Failed if data are lost."""
    found = Found()
    wait_until_free(options.idle_mib)
    settings: dict[str, Any] = {"fraction": FRACTION, "backup": True, "gpus": 2}
    with engine_process(WORKER, OURS, options, variables=variables, **settings) as child:
        begin(child, options)
        for _ in range(options.cycles):
            time.sleep(options.wait)
            found.held += child.ask("release")["held"]
            time.sleep(options.wait)
            found.used.append([used_mib(0), used_mib(1)])
            answer = child.ask("generate_first", resume=True)
            if answer["lost"]:
                raise Failed(f"{METRIC} with {variables}: {answer['lost']}")
            found.resumes.append(answer["resume"])
    return found
