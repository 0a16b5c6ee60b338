"""Measure an SGLang engine's release and resume cycle with memsaver and torch_memory_saver.

    PYTHONPATH=/parent/of/torch_memory_saver python benchmarks/sglang_cycle.py [--only cycle]

Requires SGLang, and an installed memsaver whose plugin SGLang finds. The engine serves a model with
Qwen3-8B's shape and random weights, 16.4 GB, on one GPU, including CUDA graphs.

Measurements
    fraction    the largest mem_fraction_static with which an engine wakes up next to a trainer that
                has a copy of the weights, in stages and all at once
    cycle       release and resume of each tag, with weights backed up in host memory: as loaded,
                without changes, and after a weight update; decoding before and after; the start of
                the engine
    plain       decoding, alternating with an engine without a memory saver
    switch      two engines that take turns on the GPU: the time from a request for the sleeping
                engine to its first token; memory in use while only the first engine sleeps
    neighbour   as switch, with backups on another GPU, compared with backups in host memory;
                skipped on a machine with one GPU
    storm       requests of all kinds to a server of a small model while it sleeps and wakes up;
                each must be answered with the tokens that an awake server generates
    tp2         memory in use while an engine on two GPUs sleeps, with suspended communicators
                and without; skipped on a machine with one GPU

Each engine runs in a separate process. Except in plain, switch and neighbour, an engine has
exclusive use of the GPU. memsaver's engines and the peer's engines run one after the other. The
first engine of a run compiles kernels, so its start is not counted. Each step begins after a wait
of --wait seconds. The driver clears released memory during this wait, so the clearing is not
measured. All times are measured by the engine's caller, and outliers are included.

New weights come from a trainer's tensors in the process that calls the engine. These tensors are
freed before the release. The engine's checksum of its weights before each release is compared with
the checksum after the resume. If a library loses bytes, its measurement fails and produces no row.

Host memory is touched first (--touch-gib); see pause_resume.py. Progress goes to stderr. Prints
a table, and merges each row into --output as soon as it exists (see results.py).
"""

from __future__ import annotations

import argparse
import sys

import engine_benchmark
import runs
import sglang_benchmark
from parts import (
    sglang_fraction,
    sglang_plain,
    sglang_storm,
    sglang_switch,
    sglang_tags,
    sglang_tp2,
)

# The order of measurement: the second part needs compiled kernels.
PARTS: dict[str, runs.Measure] = {
    "fraction": sglang_fraction.measure,
    "cycle": sglang_tags.measure,
    "plain": sglang_plain.measure,
    "switch": sglang_switch.measure,
    "neighbour": sglang_switch.measure_neighbour,
    "storm": sglang_storm.measure,
    "tp2": sglang_tp2.measure,
}


def run(options: argparse.Namespace) -> int:
    """Run the selected measurements, and return an exit status."""
    return sglang_benchmark.run(PARTS, options, needs_peer(options))


def needs_peer(options: argparse.Namespace) -> bool:
    """Return whether a selected measurement needs torch_memory_saver."""
    return options.peer and not {"cycle", "switch"}.isdisjoint(options.only)


def fractions_of(text: str) -> list[float]:
    """Parse the value of --fractions."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < fraction < 1 for fraction in found):
        raise argparse.ArgumentTypeError("numbers between 0 and 1, separated by commas")
    return sorted(set(found))


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = engine_benchmark.parser(__doc__, PARTS, wait=1.0, touch_gib=24)
    add = made.add_argument
    add(
        "--cycles",
        type=int,
        default=3,
        help="number of cycles with new weights, and of cycles without",
    )
    add(
        "--decodes",
        type=int,
        default=5,
        help="batches of 8 x 256 tokens before the cycles, and after them",
    )
    add(
        "--fractions",
        type=fractions_of,
        default="0.86,0.90,0.94",
        help="fraction: values of mem_fraction_static to try",
    )
    add(
        "--turns",
        type=int,
        default=8,
        help="plain: number of turns of each engine, each with 2 batches",
    )
    add("--requests", type=int, default=1000, help="storm: number of requests")
    add("--naps", type=int, default=100, help="storm: number of sleeps, each followed by a wake-up")
    add(
        "--storm-seconds",
        type=float,
        default=600,
        help="storm: seconds after which the measurement fails",
    )
    add(
        "--trainer-gb",
        type=float,
        default=16.4,
        help="smallest size of the trainer's memory, in GB",
    )
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
