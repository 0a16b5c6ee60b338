"""Measure an RL step in which an SGLang engine and a trainer use a GPU's memory in turn.

    PYTHONPATH=/parent/of/torch_memory_saver python benchmarks/rl_cycle.py [--only kv,step,overhead]

Requires SGLang, and an installed memsaver whose plugin SGLang finds. The engine serves a model with
Qwen3-8B's shape and random weights, 16.4 GB, including CUDA graphs. The trainer runs in the process
that calls the engine. It has a bfloat16 copy of the weights, and an optimizer with --states states
of the same size. Its kernels access all of this memory. The copy and the states are backed up in
host memory. With memsaver, memsaver.integrations.trainer.offload creates the backups. With
torch_memory_saver, the tensors are in regions. See rl_engine.py for the stages of a step.

Measurements
    kv      the largest KV cache with which a step completes: with memsaver, waking in stages,
            waking all at once, and the engine alone on the GPU; with the peer, waking in stages.
            About 6 minutes
    step    seconds of each transition of a step, and the peak of memory in use in each stage, for
            memsaver and torch_memory_saver; with the peer's option to retain host memory, only
            the seconds. About 6 minutes, most of them the peer's
    overhead  seconds that a complete step takes beyond its training, update and generation,
            without a backup of the engine's weights; the peer retains host memory. About 5 minutes

Each library's engine and trainer run in separate processes, with exclusive use of the GPU. If a
peer's run ends early, the program continues, and the peer's rows report the failure or contain its
earlier results. NVML reports the memory in use. Host memory is touched first (--touch-gib); see
pause_resume.py. Progress is printed to stderr. Prints a table, and merges each row into --output as
soon as it exists (see results.py).
"""

from __future__ import annotations

import argparse
import sys

import device_memory
import engine_benchmark
import runs
import sglang_benchmark
from parts import rl_kv, rl_overhead, rl_step

PARTS: dict[str, runs.Measure] = {
    "kv": rl_kv.measure,
    "step": rl_step.measure,
    "overhead": rl_overhead.measure,
}


def run(options: argparse.Namespace) -> int:
    """Run the selected measurements, and return an exit status."""
    return sglang_benchmark.run(PARTS, options, options.peer, device_memory.DeviceMemory)


def fraction_of(text: str) -> float:
    """Parse the value of --fraction."""
    fraction = float(text)
    if not 0 < fraction < 1:
        raise argparse.ArgumentTypeError("a number between 0 and 1")
    return fraction


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = engine_benchmark.parser(__doc__, PARTS, wait=0.5, touch_gib=72)
    add = made.add_argument
    add(
        "--steps",
        type=runs.at_least(1),
        default=3,
        help="steps of each library, after one that is not measured",
    )
    add(
        "--states",
        type=runs.at_least(1),
        default=2,
        help="number of optimizer states, each as large as the weights",
    )
    add(
        "--fraction",
        type=fraction_of,
        default=0.85,
        help="step: mem_fraction_static of the engines",
    )
    add("--bucket-mib", type=runs.at_least(1), default=512, help="MiB of weights in a bucket")
    add(
        "--train-tokens",
        type=runs.at_least(1),
        default=16384,
        help="overhead: tokens for which the trainer computes gradients in a step",
    )
    add(
        "--engine-backup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="step: back up the engine's weights; kv updates them, and needs no backup",
    )
    add("--kv-seconds", type=float, default=360, help="kv: seconds until the last engine starts")
    add(
        "--step-seconds", type=float, default=330, help="step: seconds until the last engine starts"
    )
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
