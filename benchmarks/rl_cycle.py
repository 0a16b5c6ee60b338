"""A whole step of RL on one GPU: an SGLang engine and a trainer that take turns with its memory.

    PYTHONPATH=where/torch_memory_saver/lies python benchmarks/rl_cycle.py [--only kv,step]

Needs SGLang, and memsaver installed so that SGLang finds its plugin. The engine serves a model of
Qwen3-8B's shape with random weights, 16.4 GB, CUDA graphs included. The trainer, in the process of
the engine's caller, has a copy of the weights in bfloat16 and an optimizer with --states states of
that size; its kernels go over all of it. Both are backed up in host memory: with memsaver by
memsaver.integrations.trainer.offload, with torch_memory_saver in regions. What a step is made of
is in rl_engine.py.

What is measured
    kv      the largest KV cache with which a step completes: waking in stages, waking all at once,
            and the engine alone on the GPU; the peer's waking in stages. About 6 minutes
    step    seconds of each transition of a step, and the most memory in use in each stage, of
            memsaver and torch_memory_saver, and with its option to retain host memory the
            seconds. About 6 minutes, most of them the peer's

Each library's engine and trainer live in processes of their own, and have the GPU for themselves.
A peer that ends is no end of the run: its rows say so, or have what it did before. Memory in use is
what NVML says. Host memory is touched before (--touch-gib), for the reason that pause_resume.py
has. Progress goes to the error output. Prints a table and merges its rows into --output (see
results.py), each when it is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import device_memory
import runs
import sglang_benchmark
from parts import rl_kv, rl_step

PARTS: dict[str, runs.Measure] = {"kv": rl_kv.measure, "step": rl_step.measure}


def run(options: argparse.Namespace) -> int:
    """Measures what was asked for; an exit status."""
    return sglang_benchmark.run(PARTS, options, options.peer, device_memory.DeviceMemory)


def at_least(least: int) -> Callable[[str], int]:
    """What parses a number that is not less."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{least} or more")
        return number

    return parse


def fraction_of(text: str) -> float:
    """The value of --fraction."""
    fraction = float(text)
    if not 0 < fraction < 1:
        raise argparse.ArgumentTypeError("a number between 0 and 1")
    return fraction


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = sglang_benchmark.parser(__doc__, PARTS, wait=0.5, touch_gib=72)
    add = made.add_argument
    add("--steps", type=at_least(1), default=3, help="of each library, after one that is not told")
    add("--states", type=at_least(1), default=2, help="of the optimizer, each as the weights")
    add(
        "--fraction",
        type=fraction_of,
        default=0.85,
        help="mem_fraction_static of the engines of step",
    )
    add("--bucket-mib", type=at_least(1), default=512, help="MiB of weights sent together")
    add(
        "--engine-backup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of the engine's weights, in step; in kv the update brings them",
    )
    add("--kv-seconds", type=float, default=360, help="after which kv starts no other engine")
    add("--step-seconds", type=float, default=330, help="after which step starts no other engine")
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
