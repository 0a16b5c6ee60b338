"""Measure a vLLM engine's sleep and wake-up with memsaver and with vLLM's own allocator.

    python benchmarks/vllm_cycle.py [--only sleep]

Requires vLLM, and an installed memsaver whose plugin vLLM finds. The engine serves a model with
Qwen3-8B's shape and random weights, 16.4 GB, with CUDA graphs; its KV cache fills half of the GPU.

Measurements
    sleep     sleep at level 1 with the initial weights, without changes, and with all weights
              changed in place beforehand; wake-up of the weights and then of the KV cache; memory
              in use while the engine sleeps; decoding before and after
    decode    decoding, alternating between two awake engines; only if it is selected

Each engine runs in a separate process. In `sleep`, the two engines use the GPU one after the other.
Each step begins after a wait of --wait seconds. The driver clears released memory during this wait,
so the clearing is not measured. All times are measured by the engine's caller, and outliers are
included.

The checksums of the weights and the output before each sleep are compared with those after the
wake-up. If an engine loses bytes, its measurement fails and produces no row.

Host memory is touched first (--touch-gib), once for both engines; see pause_resume.py. Progress
goes to stderr. Prints a table, and merges each row into --output as soon as it exists (see
results.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import engine_benchmark
import runs
from parts import vllm_decode, vllm_sleep

PARTS: dict[str, runs.Measure] = {
    "sleep": vllm_sleep.measure,
    "decode": vllm_decode.measure,
}


def run(options: argparse.Namespace) -> int:
    """Run the selected measurements, and return an exit status."""
    return engine_benchmark.run(PARTS, options, why_not)


def why_not() -> str:
    """Describe the missing requirement; "" if there is none."""
    return "" if importlib.util.find_spec("vllm") else "vLLM is not installed"


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = engine_benchmark.parser(__doc__, PARTS, wait=0.5, touch_gib=24)
    made.set_defaults(only=["sleep"])
    add = made.add_argument
    add(
        "--gpus",
        type=int,
        default=1,
        help="number of GPUs for tensor parallelism; 2 gives the metrics vllm_tp2_*",
    )
    add(
        "--cycles",
        type=int,
        default=3,
        help="number of cycles with changed weights, and of cycles without",
    )
    add(
        "--decodes",
        type=int,
        default=3,
        help="batches of 8 x 256 tokens before the cycles, and after them",
    )
    add(
        "--turns",
        type=int,
        default=8,
        help="decode: number of turns of each engine, each with 2 batches",
    )
    help_seconds = "sleep: seconds after which each kind of cycle runs only once"
    add("--seconds", type=float, default=220, help=help_seconds)
    add("--attention", default="TRITON_ATTN", help="vLLM's attention backend")
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
