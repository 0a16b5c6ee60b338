"""Measure the memory that a sleeping SGLang engine holds with tensor parallelism on two GPUs.

Compares suspended NCCL communicators (MEMSAVER_SGLANG_SUSPEND_NCCL=1) with communicators that keep
their memory, and the resumes of all memory. The memory in use is that of the GPU with more. Needs
NCCL 2.29.7 or newer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import results
from children import Failed, attempt
from engine_process import begin, say, used_mib, wait_until_free
from libraries import OURS
from raw_driver import count_gpus
from sglang_engine import BENCH, engine_process

METRIC = "sglang_tp2_resident_MiB"
RESUME = "sglang_tp2_resume_ms"
PEER = "memsaver, communicators not suspended"
WORKER = "parts.sglang_switch:Switching"
FRACTION = 0.75


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of METRIC and RESUME; no row on a machine with fewer than two GPUs."""
    if options.device != "cpu" and count_gpus() < 2:
        say(f"{METRIC} needs two GPUs")
        return
    used: dict[str, list[list[float]]] = {"1": [], "0": []}  # of each GPU
    held: dict[str, list[dict[str, int]]] = {"1": [], "0": []}
    resumes: dict[str, list[float]] = {"1": [], "0": []}
    for suspends in used:
        wait_until_free(options.idle_mib)
        variables = {"MEMSAVER_SGLANG_SUSPEND_NCCL": suspends}
        settings: dict[str, Any] = {"fraction": FRACTION, "backup": True, "gpus": 2}
        with (
            attempt(failures),
            engine_process(WORKER, OURS, options, variables=variables, **settings) as child,
        ):
            begin(child, options)
            for _ in range(options.cycles):
                time.sleep(options.wait)
                held[suspends] += child.ask("release")["held"]
                time.sleep(options.wait)
                used[suspends].append([used_mib(0), used_mib(1)])
                answer = child.ask("generate_first", resume=True)
                if answer["lost"]:
                    raise Failed(f"{METRIC}, suspended={suspends}: {answer['lost']}")
                resumes[suspends].append(answer["resume"])
    if all(used.values()):
        ours, theirs = ([max(gpus) for gpus in used[suspends]] for suspends in ("1", "0"))
        row = results.measurement(METRIC, ours, PEER, theirs, bench=BENCH)
        row["detail"] |= {"memsaver_gpus": used["1"], "peer_gpus": used["0"]}
        row["detail"] |= {"memsaver_held": held["1"], "peer_held": held["0"]}
        yield row
        yield results.measurement(RESUME, resumes["1"], PEER, resumes["0"], bench=BENCH)
